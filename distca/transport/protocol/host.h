// The fabric of processes that share memory. A waiting thread sleeps on its rank's bell, a futex.
#pragma once

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <vector>

#include "exchange.h"
#include "puts.h"

namespace distca {

using Clock = std::chrono::steady_clock;
using Flag = std::atomic<Word>;
static_assert(Flag::is_always_lock_free && sizeof(Flag) == sizeof(Word), "flags cross processes");

// Longest sleep of a waiting thread before it checks that its peer is still alive.
constexpr std::chrono::milliseconds kNap{20};

// The control memory of all ranks, as mapped in this process.
class Controls {
 public:
  // `locks`: for each rank a file that its process holds a lock on until it ends.
  Controls(int rank, int ranks, char* const* memory, const int* locks)
      : rank_(rank), memory_(memory, memory + ranks), locks_(locks, locks + ranks) {}

  int rank() const { return rank_; }
  int ranks() const { return int(memory_.size()); }

  Flag& flag(int peer, Word offset) const {
    return *reinterpret_cast<Flag*>(memory_[peer] + offset);
  }

  void set(int peer, Word offset, Word value) const {
    flag(peer, offset).store(value, std::memory_order_release);
    ring(peer);
  }

  // Sleeps until this rank's bell has rung more than `rung` times, or a nap is over.
  void nap(unsigned rung) const {
    Bell& mine = bell(rank_);
    mine.sleepers.fetch_add(1);
    const timespec nap{0, std::chrono::nanoseconds(kNap).count()};
    syscall(SYS_futex, &mine.rung, FUTEX_WAIT, rung, &nap, nullptr, 0);
    mine.sleepers.fetch_sub(1);
  }

  unsigned rung() const { return bell(rank_).rung.load(); }

  // `died` or `left` if a peer will never set a flag again; else `done`.
  Outcome fate(int peer) const {
    if (flag(peer, kLeftWord).load(std::memory_order_acquire)) return Outcome::left;
    // The system drops the lock of a process that ends, however it ends.
    struct flock lock {};
    lock.l_type = F_WRLCK;
    lock.l_whence = SEEK_SET;
    const bool asked = fcntl(locks_[peer], F_GETLK, &lock) == 0;
    return asked && lock.l_type == F_UNLCK ? Outcome::died : Outcome::done;
  }

  // Ends the exchange on every rank; the first reason stays.
  void abort_all(Word why) const {
    for (int peer = 0; peer < ranks(); ++peer) {
      Word none = 0;
      flag(peer, kAbortWord).compare_exchange_strong(none, why);
      ring(peer);
    }
  }

 private:
  struct Bell {
    std::atomic<unsigned> rung;
    std::atomic<unsigned> sleepers;
  };

  Bell& bell(int peer) const { return *reinterpret_cast<Bell*>(memory_[peer] + kBell); }

  void ring(int peer) const {
    Bell& its = bell(peer);
    its.rung.fetch_add(1);
    if (its.sleepers.load() > 0) {
      syscall(SYS_futex, &its.rung, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
    }
  }

  int rank_;
  std::vector<char*> memory_;
  std::vector<int> locks_;
};

// One channel of a rank, as the fabric of `exchange.h`. Waits end at `until` with `not_yet`.
class HostFabric {
 public:
  explicit HostFabric(const Controls& controls)
      : controls_(controls), arenas_(controls.ranks()), complete_(controls.ranks()) {}

  std::vector<char*>& arenas() { return arenas_; }
  void wait_until(Clock::time_point until) { until_ = until; }

  int rank() const { return controls_.rank(); }
  int ranks() const { return controls_.ranks(); }
  bool leads() const { return true; }
  Outcome shared(Outcome outcome) const { return outcome; }
  void all_put() const {}

  void put(int peer, Word to, const char* from, Word bytes) {
    puts_.put(arenas_[peer] + to, from, bytes);
  }
  void fence(int) { puts_.fence(); }
  void set(int peer, Word flag, Word value) { controls_.set(peer, flag, value); }

  bool last_part(int peer, int parts) {
    if (++complete_[peer] < parts) return false;
    complete_[peer] = 0;
    return true;
  }

  Outcome wait_for(int peer, Word flag, Word value) const {
    const Flag& mine = controls_.flag(controls_.rank(), flag);
    const Flag& abort = controls_.flag(controls_.rank(), kAbortWord);
    auto look_at_peer = Clock::now() + kNap;
    for (;;) {
      const unsigned rung = controls_.rung();
      if (mine.load(std::memory_order_acquire) >= value) return Outcome::done;
      if (abort.load(std::memory_order_acquire)) return Outcome::aborted;
      const auto now = Clock::now();
      if (now >= look_at_peer) {
        look_at_peer = now + kNap;
        const Outcome fate = controls_.fate(peer);
        if (fate != Outcome::done) {
          // The peer may have set the flag just before it ended.
          return mine.load(std::memory_order_acquire) >= value ? Outcome::done : fate;
        }
      }
      if (now >= until_) return Outcome::not_yet;
      controls_.nap(rung);
    }
  }

 private:
  const Controls& controls_;
  std::vector<char*> arenas_;
  std::vector<int> complete_;
  Puts puts_;
  Clock::time_point until_{};
};

}  // namespace distca
