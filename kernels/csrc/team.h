// The threads of one operator: how they divide its work and wait for each other.
//
// Threads of our own, not OpenMP's: a barrier of OpenMP spins through the whole time slice of a neighbour that
// has taken one of its threads' processor, and some compilers have no OpenMP. Ours spins for a moment, in which
// a thread that is running arrives, and then sleeps, so that the system may run the late one in its place.
#pragma once

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <mutex>
#include <thread>

#include "kernels.h"

namespace eagle {

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

using Clock = std::chrono::steady_clock;

// Wait until `word` differs from `old`: spin for `awake`, then sleep. Returns the time after the first moment.
inline Clock::duration wait_for_change(const std::atomic<uint32_t>& word, uint32_t old, Clock::duration awake) {
  for (int i = 0; i < 512; i++, pause())
    if (word.load(std::memory_order_acquire) != old) return {};
  const auto begin = Clock::now();
  while (Clock::now() - begin < awake)
    for (int i = 0; i < 64; i++, pause())
      if (word.load(std::memory_order_acquire) != old) return Clock::now() - begin;
  while (word.load(std::memory_order_acquire) == old) word.wait(old, std::memory_order_acquire);
  return Clock::now() - begin;
}

// What the threads of a team share.
class Meeting {
 public:
  // What is left of a thread's share: the first item in the high half, one past the last in the low half.
  struct alignas(64) Left {
    std::atomic<uint64_t> range{0};
  };
  int64_t all;
  std::vector<Left> left;

  explicit Meeting(int64_t all) : all(all), left(all) {}

  // Wait until all have come here. Returns for how long asleep.
  Clock::duration wait() {
    const uint32_t now = phase.load(std::memory_order_acquire);
    if (arrived.fetch_add(1, std::memory_order_acq_rel) + 1 < all) return wait_for_change(phase, now, AWAKE);
    arrived.store(0, std::memory_order_relaxed);
    phase.store(now + 1, std::memory_order_release);
    phase.notify_all();
    return {};
  }

 private:
  static constexpr std::chrono::microseconds AWAKE{1000};
  alignas(64) std::atomic<int64_t> arrived{0};
  alignas(64) std::atomic<uint32_t> phase{0};
};

struct Team {
  int64_t me, all;
  Meeting* meeting;
  Clock::duration* asleep = nullptr;  // how long the first thread has waited for others, asleep

  // body(team) on so many threads, the calling one among them.
  template <class Body>
  static void run(int threads, const Body& body);

  // Wait until all have come here.
  void meet() const {
    if (all == 1) return;
    const Clock::duration slept = meeting->wait();
    if (asleep) *asleep += slept;
  }
  // body(i) for this thread's share of 0..count-1, consecutive ones.
  template <class Body>
  void share(int64_t count, const Body& body) const {
    for (int64_t i = count * me / all; i < count * (me + 1) / all; i++) body(i);
  }
  // Work stealing: as `share`, but a finished thread takes items from the end of another's share. body(i, last):
  // i ends this thread's own share, unless another has taken that one. All must meet before and after.
  template <class Body>
  void deal(int64_t count, const Body& body) const {
    const uint64_t first = count * me / all, end = count * (me + 1) / all;
    meeting->left[me].range = first << 32 | end;
    for (int64_t other = 0; other < all; other++) {
      std::atomic<uint64_t>& range = meeting->left[(me + other) % all].range;
      for (uint64_t had = range; (had >> 32) + (other > 0) < (had & 0xFFFFFFFF);)  // one stays with its owner
        if (range.compare_exchange_weak(had, other ? had - 1 : had + (uint64_t(1) << 32))) {
          const uint64_t i = other ? (had & 0xFFFFFFFF) - 1 : had >> 32;
          body(i, i + 1 == end);
          had = range;
        }
    }
  }
};

// Threads that wait for work. They are never ended: the process takes them along.
//
// Where a thread is late because something else has its processor, the others would sleep until it is back,
// again and again: a job does with fewer threads then, and now and then tries with one more.
class Pool {
 public:
  // The pool of this process with so many threads, the caller's own counted. A forked process has no threads
  // of its parent's and makes its own.
  static Pool& of(int threads) {
    static std::mutex guard;
    static Pool* pool = nullptr;
    const std::lock_guard<std::mutex> lock(guard);
    if (!pool || pool->process != getpid() || pool->threads != threads) {
      if (pool && pool->process == getpid()) pool->end();
      pool = new Pool(threads);
    }
    return *pool;
  }

  using Work = void (*)(const void* body, const Team& team);

  // False, and nothing is done, if the threads are at work for another caller, or have ended.
  bool run(Work work, const void* body) {
    const std::unique_lock<std::mutex> lock(free, std::try_to_lock);
    if (!lock || ended) return false;
    const auto now = Clock::now();
    if (active > 1 && now - since >= WINDOW) {
      if (lost * active > (now - since) * 0.8) {  // fewer threads lose less
        active--;
        pause_for = tried ? std::min<Clock::duration>(2 * pause_for, LONGEST) : SHORTEST;
        next_try = now + pause_for;
      }
      tried = false, since = now, lost = {};
    }
    if (active < threads && now >= next_try) active++, tried = true, since = now, lost = {};
    this->work = work, this->body = body;
    meeting.all = active;
    Clock::duration asleep{};
    const Team team{0, active, &meeting, &asleep};
    if (active > 1) {
      job.store((job.load() / MOST + 1) * MOST + active, std::memory_order_release);
      job.notify_all();
    }
    work(body, team);
    team.meet();
    lost += asleep;
    return true;
  }

 private:
  static constexpr uint32_t MOST = 4096;  // threads, above what --threads takes
  static constexpr std::chrono::microseconds AWAKE{2000};  // longer than what lies between two jobs of a step
  static constexpr std::chrono::milliseconds WINDOW{20}, SHORTEST{100}, LONGEST{1600};
  const pid_t process = getpid();
  const int threads;
  int active;         // of them, in the next job
  bool tried = true;  // whether one was added for the window at hand
  Clock::time_point since = Clock::now(), next_try{};
  Clock::duration lost{}, pause_for = SHORTEST;  // since `since`, asleep; how long to do with fewer threads
  Meeting meeting;
  std::mutex free;
  std::atomic<uint32_t> job{0};  // its number times MOST, and how many threads it has
  bool ended = false;
  Work work = nullptr;
  const void* body = nullptr;

  explicit Pool(int threads) : threads(threads), active(threads), meeting(threads) {
    for (int64_t me = 1; me < threads; me++)
      std::thread([this, me] {
        for (uint32_t seen = 0;;) {
          wait_for_change(job, seen, AWAKE);
          seen = job.load(std::memory_order_acquire);
          const int64_t all = seen % MOST;
          if (!all) return;
          if (me >= all) continue;
          work(body, Team{me, all, &meeting});
          meeting.wait();
        }
      }).detach();
  }

  void end() {  // the pool itself stays: a thread may still look at it
    const std::lock_guard<std::mutex> lock(free);
    ended = true;
    job.store((job.load() / MOST + 1) * MOST, std::memory_order_release);
    job.notify_all();
  }
};

template <class Body>
void Team::run(int threads, const Body& body) {
  const auto work = [](const void* body, const Team& team) { (*static_cast<const Body*>(body))(team); };
  if (threads > 1 && Pool::of(threads).run(work, &body)) return;
  Meeting alone(1);
  body(Team{0, 1, &alone});
}

}  // namespace eagle
