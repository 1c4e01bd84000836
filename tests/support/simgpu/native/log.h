// What happens on the simulated GPUs, in the order in which the host asks for it.
#pragma once
#include <ATen/ATen.h>
#include <torch/csrc/utils/pybind.h>

#include <pybind11/functional.h>

#include <array>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace simgpu {

// Bytes that an operation reads or writes: address of the allocation, first byte, end, 1 if written.
using Access = std::array<int64_t, 4>;

// kind: op, copy, sync, record, wait, record_stream, alloc, free, pin_alloc, pin_free, replay.
// Streams have one number on all devices; a, b: event or address, and bytes.
struct Record {
  std::string kind, name;
  int64_t device = 0, stream = 0, a = 0, b = 0, thread = 0;
  std::vector<Access> accesses;
};

class Log {
 public:
  void start() {
    std::lock_guard<std::mutex> lock(mutex_);
    records_.clear();
    on_ = true;
  }
  std::vector<Record> stop() {
    std::lock_guard<std::mutex> lock(mutex_);
    on_ = false;
    return std::exchange(records_, {});
  }
  bool on() const { return on_; }
  void add(Record record) {
    if (!on_) return;
    record.thread = std::hash<std::thread::id>()(std::this_thread::get_id()) % 1000003;
    // Python says where a wait is asked for. Operators run without Python's lock.
    if (record.kind == "sync" && !where.is_none()) {
      pybind11::gil_scoped_acquire lock;
      record.name += " at " + where().cast<std::string>();
    }
    std::lock_guard<std::mutex> lock(mutex_);
    if (on_) records_.push_back(std::move(record));
  }
  pybind11::object where = pybind11::none();

 private:
  std::mutex mutex_;
  std::atomic<bool> on_{false};
  std::vector<Record> records_;
};

// Never destroyed: tensors are freed after static objects.
inline Log& log() {
  static Log* it = new Log;
  return *it;
}

}  // namespace simgpu
