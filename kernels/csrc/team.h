// The threads of one operator: how they divide its work and wait for each other.
//
// at::parallel_for would take the thread count from the OpenMP runtime that this library is linked to, which
// need not be the one torch.set_num_threads speaks to.
#pragma once

#include <ATen/Parallel.h>
#include <omp.h>

#include <atomic>
#include <cstdint>
#include <vector>

namespace {

struct Team {
  // What is left of a thread's share: the first item in the high half, one past the last in the low half.
  struct alignas(64) Left {
    std::atomic<uint64_t> range{0};
  };
  int64_t me, all;
  Left* left;

  template <class Body>
  static void run(const Body& body) {
    const int threads = at::get_num_threads();
    std::vector<Left> left(threads);
#pragma omp parallel num_threads(threads) if (threads > 1)
    body(Team{omp_get_thread_num(), omp_get_num_threads(), left.data()});
  }
  // Wait until all have come here.
  void meet() const {
#pragma omp barrier
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
    left[me].range = first << 32 | end;
    for (int64_t other = 0; other < all; other++) {
      std::atomic<uint64_t>& range = left[(me + other) % all].range;
      for (uint64_t had = range; (had >> 32) + (other > 0) < (had & 0xFFFFFFFF);)  // one stays with its owner
        if (range.compare_exchange_weak(had, other ? had - 1 : had + (uint64_t(1) << 32))) {
          const uint64_t i = other ? (had & 0xFFFFFFFF) - 1 : had >> 32;
          body(i, i + 1 == end);
          had = range;
        }
    }
  }
};

}  // namespace
