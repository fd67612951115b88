// A thread pool: parallel loops, barriers, work stealing.
//
// Why not OpenMP: its barriers spin while a thread is descheduled, for the whole time slice of another process, and
// some compilers have no OpenMP. Our barriers spin briefly, then sleep, so that the system can run the late thread.
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

// Wait until `word` differs from `old`: spin for `spin_time`, then sleep. Returns the time after the first spins.
inline Clock::duration wait_for_change(const std::atomic<uint32_t>& word, uint32_t old, Clock::duration spin_time) {
  for (int i = 0; i < 512; i++, pause())
    if (word.load(std::memory_order_acquire) != old) return {};
  const auto start = Clock::now();
  while (Clock::now() - start < spin_time)
    for (int i = 0; i < 64; i++, pause())
      if (word.load(std::memory_order_acquire) != old) return Clock::now() - start;
  while (word.load(std::memory_order_acquire) == old) word.wait(old, std::memory_order_acquire);
  return Clock::now() - start;
}

// The shared state of a team: a barrier, and the work left to each thread.
class TeamState {
 public:
  // A thread's remaining items: first in the high half, end in the low half.
  struct alignas(64) Remaining {
    std::atomic<uint64_t> range{0};
  };
  int64_t threads;
  std::vector<Remaining> remaining;

  explicit TeamState(int64_t threads) : threads(threads), remaining(threads) {}

  // A barrier. Returns the time asleep.
  Clock::duration wait() {
    const uint32_t now = phase.load(std::memory_order_acquire);
    if (arrived.fetch_add(1, std::memory_order_acq_rel) + 1 < threads) return wait_for_change(phase, now, SPIN_TIME);
    arrived.store(0, std::memory_order_relaxed);
    phase.store(now + 1, std::memory_order_release);
    phase.notify_all();
    return {};
  }

 private:
  static constexpr std::chrono::microseconds SPIN_TIME{1000};
  alignas(64) std::atomic<int64_t> arrived{0};
  alignas(64) std::atomic<uint32_t> phase{0};
};

struct Team {
  int64_t thread, threads;
  TeamState* state;
  Clock::duration* sleep_time = nullptr;  // time that the first thread slept, waiting for others

  // Call body(team) on `threads` threads, including the calling one.
  template <class Body>
  static void run(int threads, const Body& body);

  // Wait for all threads.
  void barrier() const {
    if (threads == 1) return;
    const Clock::duration slept = state->wait();
    if (sleep_time) *sleep_time += slept;
  }
  // Call body(i) for this thread's part of 0 ... count - 1, a contiguous range.
  template <class Body>
  void parallel_for(int64_t count, const Body& body) const {
    for (int64_t i = count * thread / threads; i < count * (thread + 1) / threads; i++) body(i);
  }
  // `parallel_for` with work stealing: a finished thread takes items from the end of another's range. last: i ends the
  // thread's own range. Needs a barrier before and after.
  template <class Body>
  void parallel_for_stealing(int64_t count, const Body& body) const {
    const uint64_t first = count * thread / threads, end = count * (thread + 1) / threads;
    state->remaining[thread].range = first << 32 | end;
    for (int64_t other = 0; other < threads; other++) {
      std::atomic<uint64_t>& range = state->remaining[(thread + other) % threads].range;
      for (uint64_t had = range; (had >> 32) + (other > 0) < (had & 0xFFFFFFFF);)  // never steal the last item
        if (range.compare_exchange_weak(had, other ? had - 1 : had + (uint64_t(1) << 32))) {
          const uint64_t i = other ? (had & 0xFFFFFFFF) - 1 : had >> 32;
          body(i, i + 1 == end);
          had = range;
        }
    }
  }
};

// The threads of the process, which wait for work until it exits.
//
// If other processes take processors, the team would wait for descheduled threads at every barrier. So the pool
// reduces the number of active threads, and tries one more from time to time.
class Pool {
 public:
  // Return the process's pool, with `threads` threads including the caller's. A forked process starts its own.
  static Pool& get(int threads) {
    static std::mutex guard;
    static Pool* pool = nullptr;
    const std::lock_guard<std::mutex> lock(guard);
    if (!pool || pool->process != getpid() || pool->threads != threads) {
      if (pool && pool->process == getpid()) pool->stop();
      pool = new Pool(threads);
    }
    return *pool;
  }

  using Work = void (*)(const void* body, const Team& team);

  // Returns false, without running `work`, if the pool is busy with another caller or stopped.
  bool run(Work work, const void* body) {
    const std::unique_lock<std::mutex> lock(free, std::try_to_lock);
    if (!lock || stopped) return false;
    const auto now = Clock::now();
    if (active > 1 && now - since >= PERIOD) {
      if (lost * active > (now - since) * 0.8) {  // waiting costs more than a thread saves
        active--;
        pause_for = trial ? std::min<Clock::duration>(2 * pause_for, MAX_PAUSE) : MIN_PAUSE;
        next_try = now + pause_for;
      }
      trial = false, since = now, lost = {};
    }
    if (active < threads && now >= next_try) active++, trial = true, since = now, lost = {};
    this->work = work, this->body = body;
    state.threads = active;
    Clock::duration sleep_time{};
    const Team team{0, active, &state, &sleep_time};
    if (active > 1) {
      job.store((job.load() / MAX_THREADS + 1) * MAX_THREADS + active, std::memory_order_release);
      job.notify_all();
    }
    work(body, team);
    team.barrier();
    lost += sleep_time;
    return true;
  }

 private:
  static constexpr uint32_t MAX_THREADS = 4096;  // more than --threads accepts
  static constexpr std::chrono::microseconds SPIN_TIME{2000};  // longer than the gap between two jobs of a step
  static constexpr std::chrono::milliseconds PERIOD{20}, MIN_PAUSE{100}, MAX_PAUSE{1600};
  const pid_t process = getpid();
  const int threads;
  int active;         // threads of the next job
  bool trial = true;  // a thread was added for the current period
  Clock::time_point since = Clock::now(), next_try{};
  Clock::duration lost{}, pause_for = MIN_PAUSE;  // time asleep since `since`; time until the next trial
  TeamState state;
  std::mutex free;
  std::atomic<uint32_t> job{0};  // job number * MAX_THREADS + its number of threads
  bool stopped = false;
  Work work = nullptr;
  const void* body = nullptr;

  explicit Pool(int threads) : threads(threads), active(threads), state(threads) {
    for (int64_t thread = 1; thread < threads; thread++)
      std::thread([this, thread] {
        for (uint32_t seen = 0;;) {
          wait_for_change(job, seen, SPIN_TIME);
          seen = job.load(std::memory_order_acquire);
          const int64_t count = seen % MAX_THREADS;
          if (!count) return;
          if (thread >= count) continue;
          work(body, Team{thread, count, &state});
          state.wait();
        }
      }).detach();
  }

  void stop() {  // the object is not freed: a thread may still read it
    const std::lock_guard<std::mutex> lock(free);
    stopped = true;
    job.store((job.load() / MAX_THREADS + 1) * MAX_THREADS, std::memory_order_release);
    job.notify_all();
  }
};

template <class Body>
void Team::run(int threads, const Body& body) {
  const auto work = [](const void* body, const Team& team) { (*static_cast<const Body*>(body))(team); };
  if (threads > 1 && Pool::get(threads).run(work, &body)) return;
  TeamState single(1);
  body(Team{0, 1, &single});
}

}  // namespace eagle
