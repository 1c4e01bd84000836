// Puts as a network may do them: at any time before the fence, in any order, and not before it
// unless chance has it. Tests compile the transport with this file in the place of its own.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

namespace distca {

class Puts {
 public:
  void put(char* to, const char* from, Word bytes) {
    deferred_.push_back({to, from, bytes});
    if (random_() % 16 == 0) one_now();
    dawdle();
  }

  void fence() {
    dawdle();
    while (!deferred_.empty()) one_now();
    std::atomic_thread_fence(std::memory_order_seq_cst);
  }

 private:
  struct Deferred {
    char* to;
    const char* from;
    Word bytes;
  };

  void one_now() {
    std::swap(deferred_[random_() % deferred_.size()], deferred_.back());
    std::memcpy(deferred_.back().to, deferred_.back().from, deferred_.back().bytes);
    deferred_.pop_back();
  }

  void dawdle() {
    if (random_() % 16 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random_() % 200));
  }

  std::vector<Deferred> deferred_;
  std::mt19937 random_{std::random_device{}()};
};

}  // namespace distca
