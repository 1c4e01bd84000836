// The transport between processes that share memory, for Python's ctypes. Each channel has a thread
// that sends, as a GPU's stream does, so that messages travel while the program computes.

#include <condition_variable>
#include <memory>
#include <mutex>
#include <new>
#include <thread>

#include "host.h"

namespace distca {

// Bytes of a message that are copied at a time. On a GPU thread blocks copy parts side by side.
constexpr Word kPartBytes = 1 << 16;

// Interval at which a waiting sender checks whether it must end.
constexpr std::chrono::milliseconds kSlice{100};

class Channel {
 public:
  Channel(const Controls& controls, int number)
      : number(number),
        flags(number, controls.ranks()),
        sending(controls),
        receiving(controls) {}

  const int number;
  const Flags flags;
  HostFabric sending, receiving;  // of the sending thread; of the program
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<Message> messages;  // to each rank, in the exchange under way
  std::vector<Word> epochs;       // of each rank's message; 0: there is none
  Word asked = 0, sent = 0;       // the last exchanges that were started, and sent
  std::thread thread;
};

class Endpoint {
 public:
  Endpoint(int rank, int ranks, int channels, char* const* memory, const int* locks,
           double timeout_seconds)
      : controls_(rank, ranks, memory, locks),
        timeout_(std::chrono::duration_cast<Clock::duration>(
            std::chrono::duration<double>(timeout_seconds))) {
    for (int number = 0; number < channels; ++number) {
      channels_.push_back(std::make_unique<Channel>(controls_, number));
    }
    for (auto& channel : channels_) {
      channel->thread = std::thread([this, &channel = *channel] { send_for(channel); });
    }
  }

  ~Endpoint() {
    for (auto& channel : channels_) {
      std::lock_guard<std::mutex> lock(channel->mutex);
      closing_ = true;
      channel->changed.notify_all();
    }
    for (auto& channel : channels_) channel->thread.join();
    controls_.flag(controls_.rank(), kLeftWord).store(1, std::memory_order_release);
  }

  void set_arenas(int number, char* const* arenas) {
    auto& mine = channels_[number]->sending.arenas();
    mine.assign(arenas, arenas + controls_.ranks());
  }

  // Lets the thread send the messages to rank 0, 1, ..., which lie concatenated in `staging`; an
  // epoch of 0 stands for no message.
  Outcome start(int number, Word exchange, const Word* epochs, const char* staging,
                const Word* bytes, const Word* to) {
    if (failed()) return Outcome::aborted;
    Channel& channel = *channels_[number];
    std::lock_guard<std::mutex> lock(channel.mutex);
    channel.messages.clear();
    for (int peer = 0; peer < controls_.ranks(); ++peer) {
      channel.messages.push_back({staging, bytes[peer], to[peer]});
      staging += bytes[peer];
    }
    channel.epochs.assign(epochs, epochs + controls_.ranks());
    channel.asked = exchange;
    channel.changed.notify_all();
    return Outcome::done;
  }

  // Waits until all messages of an exchange are sent and received, or until a time; if that is the
  // `last` slice, a missing message is a failure. Sending has a time limit of its own.
  Outcome wait(int number, Word exchange, const Word* epochs, Clock::time_point until, bool last) {
    Channel& channel = *channels_[number];
    {
      std::unique_lock<std::mutex> lock(channel.mutex);
      const bool over = channel.changed.wait_until(
          lock, until, [&] { return channel.sent >= exchange || failed(); });
      if (!over) return Outcome::not_yet;
    }
    if (failed()) return Outcome::aborted;
    for (int shift = 1; shift < controls_.ranks(); ++shift) {
      const int source = (controls_.rank() + shift) % controls_.ranks();
      if (epochs[source] == 0) continue;
      channel.receiving.wait_until(until);
      const Outcome outcome = receive(channel.receiving, channel.flags, epochs[source], source);
      if (outcome == Outcome::not_yet && !last) return outcome;
      if (outcome != Outcome::done) return fail(outcome, source, false, number, epochs[source]);
    }
    return Outcome::done;
  }

  void release_all(int number, const Word* epochs) {
    Channel& channel = *channels_[number];
    for (int shift = 1; shift < controls_.ranks(); ++shift) {
      const int source = (controls_.rank() + shift) % controls_.ranks();
      if (epochs[source] != 0) release(channel.receiving, channel.flags, epochs[source], source);
    }
  }

  Failure failure() {
    std::lock_guard<std::mutex> lock(failing_);
    return failure_;
  }

 private:
  void send_for(Channel& channel) {
    std::unique_lock<std::mutex> lock(channel.mutex);
    for (;;) {
      channel.changed.wait(lock, [&] { return closing_ || channel.asked > channel.sent; });
      if (closing_) return;
      const Word exchange = channel.asked;
      lock.unlock();
      const bool all = send(channel);
      lock.lock();
      if (!all) {
        channel.changed.notify_all();
        return;
      }
      channel.sent = exchange;
      channel.changed.notify_all();
    }
  }

  bool send(Channel& channel) {
    const auto deadline = Clock::now() + timeout_;
    // Each rank begins with its successor, so that not all send to the same rank at once.
    for (int shift = 1; shift < controls_.ranks(); ++shift) {
      const int peer = (controls_.rank() + shift) % controls_.ranks();
      const Word epoch = channel.epochs[peer];
      if (epoch == 0) continue;
      const Message& message = channel.messages[peer];
      const int parts = 1 + int(message.bytes / kPartBytes);
      for (int part = 0; part < parts;) {
        channel.sending.wait_until(std::min(deadline, Clock::now() + kSlice));
        const Outcome outcome =
            send_part(channel.sending, channel.flags, epoch, peer, message, part, parts);
        if (outcome == Outcome::done) {
          ++part;
        } else if (outcome != Outcome::not_yet || Clock::now() >= deadline) {
          fail(outcome, peer, true, channel.number, epoch);
          return false;
        } else if (closing_) {
          return false;
        }
      }
    }
    return true;
  }

  bool failed() {
    std::lock_guard<std::mutex> lock(failing_);
    return failure_.outcome != 0;
  }

  // Keeps the first failure of this rank and tells all others.
  Outcome fail(Outcome outcome, int peer, bool sending, int channel, Word epoch) {
    if (outcome == Outcome::not_yet) outcome = Outcome::timed_out;
    // A thread that finds this rank's own abort word waits here until the reason is stored.
    std::lock_guard<std::mutex> lock(failing_);
    if (outcome != Outcome::aborted) {
      controls_.abort_all(abort_word(outcome, controls_.rank(), peer));
    }
    if (failure_.outcome == 0) {
      const Word why = controls_.flag(controls_.rank(), kAbortWord).load();
      failure_ = {Word(outcome), Word(peer), sending, Word(channel), epoch, why};
    }
    return outcome;
  }

  const Controls controls_;
  const Clock::duration timeout_;
  std::vector<std::unique_ptr<Channel>> channels_;
  std::atomic<bool> closing_{false};
  std::mutex failing_;
  Failure failure_{};
};

}  // namespace distca

extern "C" {

using distca::Endpoint;
using distca::Word;

Word distca_control_bytes(int ranks, int channels) { return distca::Flags(channels, ranks).base; }

void* distca_open(int rank, int ranks, int channels, char* const* memory, const int* locks,
                  double timeout_seconds) {
  return new Endpoint(rank, ranks, channels, memory, locks, timeout_seconds);
}

void distca_set_arenas(void* endpoint, int channel, char* const* arenas) {
  static_cast<Endpoint*>(endpoint)->set_arenas(channel, arenas);
}

int distca_start(void* endpoint, int channel, Word exchange, const Word* epochs,
                 const char* staging, const Word* bytes, const Word* to) {
  auto& here = *static_cast<Endpoint*>(endpoint);
  return int(here.start(channel, exchange, epochs, staging, bytes, to));
}

int distca_wait(void* endpoint, int channel, Word exchange, const Word* epochs,
                double slice_seconds, int last) {
  using namespace distca;
  const auto slice = std::chrono::duration_cast<Clock::duration>(
      std::chrono::duration<double>(slice_seconds));
  auto& here = *static_cast<Endpoint*>(endpoint);
  return int(here.wait(channel, exchange, epochs, Clock::now() + slice, last));
}

void distca_release(void* endpoint, int channel, const Word* epochs) {
  static_cast<Endpoint*>(endpoint)->release_all(channel, epochs);
}

void distca_failure(void* endpoint, distca::Failure* into) {
  *into = static_cast<Endpoint*>(endpoint)->failure();
}

void distca_close(void* endpoint) { delete static_cast<Endpoint*>(endpoint); }

}  // extern "C"
