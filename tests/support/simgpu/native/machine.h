// Devices, streams, events and memory. The memory of a simulated GPU is the host's.
#pragma once
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <map>

#include "capture.h"
#include "log.h"

namespace simgpu {

struct Machine {
  int devices = 1;
  int64_t capacity = int64_t(1) << 30;
  std::atomic<int64_t> next_stream{100}, next_event{1};
};
inline Machine& machine() {
  static Machine* it = new Machine;
  return *it;
}

constexpr int kMostDevices = 16;
struct ThreadState {
  int device = 0;
  std::array<int64_t, kMostDevices> streams{};  // 0: the default stream
};
inline ThreadState& here() {
  static thread_local ThreadState it;
  return it;
}
// Default streams differ by device, all others have numbers of their own.
inline int64_t stream_key(int device, int64_t stream) { return stream ? stream : -1 - device; }
inline int64_t current_key(int device) { return stream_key(device, here().streams[device]); }

inline void note(std::string kind, std::string name, int device, int64_t a = 0, int64_t b = 0,
                 std::vector<Access> accesses = {}) {
  if (!log().on()) return;
  log().add({std::move(kind), std::move(name), device, current_key(device), a, b, 0,
             std::move(accesses)});
}

// The host waits. CUDA refuses that while a stream captures.
inline void note_sync(const std::string& name, int device, int64_t a = 0, int64_t stream = 0) {
  stream = stream ? stream : current_key(device);
  capture_state().refuse_wait(name, stream);
  if (log().on()) log().add({"sync", name, device, stream, a});
}
// Which copies to the host a stream's work comes after: who waits for the stream has them.
class Copies {
 public:
  int64_t start(int64_t stream) {
    std::lock_guard<std::mutex> lock(mutex_);
    pending_.insert(++last_);
    of_streams_[stream].insert(last_);
    return last_;
  }
  void record(int64_t stream, int64_t event) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto& known = of_streams_[stream];
    for (auto it = known.begin(); it != known.end();)
      it = pending_.count(*it) ? std::next(it) : known.erase(it);
    of_events_[event] = known;
  }
  void wait(int64_t stream, int64_t event) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = of_events_.find(event);
    if (found != of_events_.end())
      of_streams_[stream].insert(found->second.begin(), found->second.end());
  }
  // What has ended once an event, or a stream's work, has: all if both are 0.
  std::set<int64_t> ended(int64_t event, int64_t stream) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto done = event ? of_events_[event] : stream ? of_streams_[stream] : pending_;
    for (auto each : done) pending_.erase(each);
    return done;
  }

 private:
  std::mutex mutex_;
  int64_t last_ = 0;
  std::set<int64_t> pending_;
  std::map<int64_t, std::set<int64_t>> of_streams_, of_events_;
};
inline Copies& copies() {
  static auto* it = new Copies;
  return *it;
}
inline void note_record(int device, int64_t stream, int64_t event) {
  capture_state().record(stream, event);
  copies().record(stream, event);
  log().add({"record", "", device, stream, event});
}
inline void note_wait(int device, int64_t stream, int64_t event) {
  capture_state().wait(stream, event);
  copies().wait(stream, event);
  log().add({"wait", "", device, stream, event});
}

// Memory of the devices, or pinned memory: where it lies and how much is in use.
class Memory {
 public:
  void add(void* data, int64_t bytes, int device) {
    std::lock_guard<std::mutex> lock(mutex_);
    live_[(int64_t)data] = {bytes, device};
    used_[device] += bytes;
    peak_[device] = std::max(peak_[device], used_[device]);
  }
  std::pair<int64_t, int> remove(void* data) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = live_.find((int64_t)data);
    if (found == live_.end()) return {0, 0};
    auto entry = found->second;
    used_[entry.second] -= entry.first;
    live_.erase(found);
    return entry;
  }
  bool holds(const void* data) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = live_.upper_bound((int64_t)data);
    if (found == live_.begin()) return false;
    --found;
    return (int64_t)data < found->first + found->second.first;
  }
  int64_t used(int device) {
    std::lock_guard<std::mutex> lock(mutex_);
    return used_[device];
  }
  int64_t peak(int device, bool reset) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto peak = peak_[device];
    if (reset) peak_[device] = used_[device];
    return peak;
  }

 private:
  std::mutex mutex_;
  std::map<int64_t, std::pair<int64_t, int>> live_;
  std::map<int, int64_t> used_, peak_;
};
inline Memory& memory() {
  static Memory* it = new Memory;
  return *it;
}
inline Memory& pinned() {
  static Memory* it = new Memory;
  return *it;
}

constexpr int64_t kRounded = 512;  // as the caching allocator's smallest block
inline void* host_bytes(size_t bytes) {
  void* data = nullptr;
  TORCH_CHECK(!posix_memalign(&data, kRounded, std::max<size_t>(bytes, kRounded)), "host memory");
  return data;
}

inline void free_device(void* data) {
  auto [bytes, device] = memory().remove(data);
  note("free", "", device, (int64_t)data, bytes);
  std::free(data);
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override { return allocate_on(bytes, here().device); }
  c10::DataPtr allocate_on(size_t bytes, int device) {
    auto rounded = ((int64_t)bytes + kRounded - 1) / kRounded * kRounded;
    auto used = memory().used(device), capacity = machine().capacity;
    TORCH_CHECK_WITH(OutOfMemoryError, used + rounded <= capacity,
                     "CUDA out of memory. Tried to allocate ", rounded, " bytes. GPU ", device,
                     " has a total capacity of ", capacity, " bytes of which ", capacity - used,
                     " bytes is free.");
    void* data = host_bytes(bytes);
    std::memset(data, 0xFF, bytes);  // not a number: reading what nobody wrote is seen
    memory().add(data, rounded, device);
    note("alloc", "", device, (int64_t)data, (int64_t)bytes);
    return {data, data, &free_device, c10::Device(c10::kCUDA, device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_device; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};
inline DeviceAllocator& device_allocator() {
  static DeviceAllocator* it = new DeviceAllocator;
  return *it;
}

inline void free_pinned(void* data) {
  auto bytes = pinned().remove(data).first;
  note("pin_free", "", here().device, (int64_t)data, bytes);
  std::free(data);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = host_bytes(bytes);
    pinned().add(data, std::max<int64_t>(bytes, 1), 0);
    note("pin_alloc", "", here().device, (int64_t)data, (int64_t)bytes);
    return {data, data, &free_pinned, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};
inline PinnedAllocator& pinned_allocator() {
  static PinnedAllocator* it = new PinnedAllocator;
  return *it;
}

inline void set_device(int device) {
  TORCH_CHECK(0 <= device && device < machine().devices, "CUDA error: invalid device ordinal (",
              device, " of ", machine().devices, ")");
  here().device = device;
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static c10::Device device(int index) { return c10::Device(c10::kCUDA, index); }
  static c10::Stream stream(int index, int64_t id) {
    return c10::Stream(c10::Stream::UNSAFE, device(index), id);
  }
  static int index_of(c10::Device device) {
    return device.has_index() ? device.index() : here().device;
  }
  static int64_t key(const c10::Stream& stream) {
    return stream_key(stream.device_index(), stream.id());
  }
  c10::DeviceType type() const override { return c10::kCUDA; }
  c10::Device exchangeDevice(c10::Device to) const override {
    auto before = getDevice();
    setDevice(to);
    return before;
  }
  c10::Device getDevice() const override { return device(here().device); }
  void setDevice(c10::Device to) const override {
    if (to.has_index()) set_device(to.index());
  }
  void uncheckedSetDevice(c10::Device to) const noexcept override {
    if (to.has_index()) here().device = to.index();
  }
  c10::Stream getStream(c10::Device of) const override {
    return stream(index_of(of), here().streams[index_of(of)]);
  }
  c10::Stream getDefaultStream(c10::Device of) const override { return stream(index_of(of), 0); }
  c10::Stream getNewStream(c10::Device of, int) const override {
    return stream(index_of(of), machine().next_stream++);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device of, bool) const override {
    return getNewStream(of, 0);
  }
  c10::Stream exchangeStream(c10::Stream to) const override {
    auto before = getStream(to.device());
    here().streams[to.device_index()] = to.id();
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return machine().devices; }
  void record(void** event, const c10::Stream& on, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    if (!*event) *event = reinterpret_cast<void*>(machine().next_event++);
    note_record(on.device_index(), key(on), (int64_t)*event);
  }
  void block(void* event, const c10::Stream& on) const override {
    note_wait(on.device_index(), key(on), (int64_t)event);
  }
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream& on) const override {
    note_sync("stream", on.device_index(), 0, key(on));
  }
  void synchronizeEvent(void* event) const override {
    note_sync("event", here().device, (int64_t)event);
  }
  void synchronizeDevice(const c10::DeviceIndex of) const override { note_sync("device", of); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& on) const override {
    log().add({"record_stream", "", on.device_index(), key(on), (int64_t)data.get()});
  }
};

struct Hooks : public at::CUDAHooksInterface {
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  void init() const override {}
  c10::DeviceIndex deviceCount() const override { return machine().devices; }
  int getNumGPUs() const override { return machine().devices; }
  c10::DeviceIndex getCurrentDevice() const override { return here().device; }
  c10::DeviceIndex current_device() const override { return here().device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex to) const override {
    return std::exchange(here().device, (int)to);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex to) const override {
    return to < 0 ? (c10::DeviceIndex)here().device : exchangeDevice(to);
  }
  void setCurrentDevice(c10::DeviceIndex to) const override { set_device(to); }
  void deviceSynchronize(c10::DeviceIndex of) const override { note_sync("device", of); }
  bool isPinnedPtr(const void* data) const override { return pinned().holds(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator(); }
  c10::Allocator* getCUDADeviceAllocator() const override { return &device_allocator(); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::detail::createCPUGenerator();
  }
};

}  // namespace simgpu
