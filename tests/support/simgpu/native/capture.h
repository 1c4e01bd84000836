// Which streams a graph's capture takes operators of, and what it refuses.
#pragma once
#include <c10/util/Exception.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>

namespace simgpu {

// Streams join a capture by waiting for an event of it, and must be waited for before it ends.
class CaptureState {
 public:
  bool on() const { return on_; }
  bool takes(int64_t stream) {
    if (!on_) return false;
    std::lock_guard<std::mutex> lock(mutex_);
    return streams_.count(stream);
  }
  void begin(int64_t stream, bool all_threads) {
    TORCH_CHECK(!on_, "CUDA error: a capture is under way");
    std::lock_guard<std::mutex> lock(mutex_);
    streams_ = {stream};
    first_ = stream;
    events_.clear();
    unjoined_.clear();
    thread_ = std::this_thread::get_id();
    all_threads_ = all_threads;
    on_ = true;
  }
  void end() {
    std::lock_guard<std::mutex> lock(mutex_);
    on_ = false;
    TORCH_CHECK(unjoined_.empty(),
                "CUDA error: operation failed due to a previous error during capture: the capture "
                "ends while ", unjoined_.size(), " stream(s) have work that it has not waited for");
  }
  void use(int64_t stream) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (stream != first_) unjoined_.insert(stream);
  }
  void record(int64_t stream, int64_t event) {
    std::lock_guard<std::mutex> lock(mutex_);
    recorded_.insert(event);
    events_.erase(event);
    if (on_ && streams_.count(stream)) events_[event] = stream;
  }
  void wait(int64_t stream, int64_t event) {
    if (!on_) return;
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = events_.find(event);
    if (found != events_.end()) {
      streams_.insert(stream);
      if (found->second != stream) unjoined_.erase(found->second);
      return;
    }
    TORCH_CHECK(!streams_.count(stream) || !recorded_.count(event),
                "CUDA error: dependency created on uncaptured work in another stream");
  }
  // The host waits, on a stream.
  void refuse_wait(const std::string& name, int64_t stream) {
    if (!on_) return;
    std::lock_guard<std::mutex> lock(mutex_);
    bool refused =
        all_threads_ || thread_ == std::this_thread::get_id() || streams_.count(stream);
    TORCH_CHECK(!refused, "CUDA error: operation not permitted when stream is capturing (", name,
                ")");
  }

 private:
  std::mutex mutex_;
  std::atomic<bool> on_{false};
  bool all_threads_ = false;
  int64_t first_ = 0;
  std::thread::id thread_;
  std::set<int64_t> streams_, recorded_, unjoined_;
  std::map<int64_t, int64_t> events_;  // of the capture, with their streams
};
inline CaptureState& capture_state() {
  static auto* it = new CaptureState;
  return *it;
}

}  // namespace simgpu
