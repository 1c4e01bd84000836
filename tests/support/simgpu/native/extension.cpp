// Makes torch take these devices for CUDA's. Loaded before torch, so that its hooks are found here.
#include <torch/library.h>

#include "operators.h"

namespace at::detail {
const CUDAHooksInterface& getCUDAHooks() {
  static auto* hooks = new simgpu::Hooks;
  return *hooks;
}
}  // namespace at::detail
namespace at::accelerator {
std::optional<c10::DeviceType> getAccelerator(bool) { return c10::kCUDA; }
}  // namespace at::accelerator

namespace simgpu {

void define_memory_operators(torch::Library& m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("copy_", &copy_);
  m.impl("_copy_from", &copy_from);
  m.impl("resize_", &resize_);
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("view_as_real", TORCH_FN(at::native::view_as_real));
  m.impl("set_", &set_nothing);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("record_stream", &record_stream);
  m.impl("_fused_sdp_choice", &sdp_choice);
}

// Takes all operators' kernels for CUDA's devices from torch, whichever build it is.
void take_over() {
  static std::vector<c10::RegistrationHandleRAII>* kept = nullptr;
  static std::vector<torch::Library>* libraries = nullptr;
  TORCH_CHECK(!kept, "operators are taken over once");
  kept = new std::vector<c10::RegistrationHandleRAII>;
  libraries = new std::vector<torch::Library>;
  static c10::impl::DeviceGuardImplRegistrar guard(c10::kCUDA, new Guard);
  c10::SetAllocator(c10::kCUDA, &device_allocator(), 255);
  auto& dispatcher = c10::Dispatcher::singleton();
  auto boxed = c10::KernelFunction::makeFromBoxedFunction<&run_on_cpu>();
  for (auto& name : dispatcher.getRegistrationsForDispatchKey(c10::DispatchKey::CUDA))
    if (name.name.rfind("aten::", 0) == 0)
      kept->push_back(dispatcher.registerImpl(name, c10::DispatchKey::CUDA, boxed, std::nullopt,
                                              nullptr, "simgpu"));
  libraries->emplace_back(torch::Library::IMPL, "_", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  libraries->back().fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
  libraries->emplace_back(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  define_memory_operators(libraries->back());
}

void synchronize(const std::string& name, int device, int64_t a, int64_t stream) {
  note_sync(name, device, a, stream);
  bool of_event = name == "event", of_stream = name == "stream";
  arrive(of_event ? a : 0, of_stream ? stream : 0);
}

// A function of Python that stands for a kernel.
void launch(const std::string& name, const std::vector<Tensor>& reads,
            const std::vector<Tensor>& writes, std::function<void()> call) {
  std::vector<Access> accesses;
  for (auto& each : reads) touch(each, false, accesses);
  for (auto& each : writes) touch(each, true, accesses), will_write(each);
  call();
  if (capturing()) {
    Captured captured;
    captured.call = call;
    captured.accesses = accesses;
    captured.name = name;
    take(std::move(captured));
  }
  note(replaying() ? "graph_op" : "op", name, here().device, 0, 0, std::move(accesses));
}

}  // namespace simgpu

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  namespace py = pybind11;
  using namespace simgpu;
  m.def("take_over", &take_over);
  m.def("configure", [](int devices, int64_t capacity) {
    TORCH_CHECK(0 < devices && devices <= kMostDevices, "1 to 16 devices");
    machine().devices = devices;
    machine().capacity = capacity;
  });
  m.def("start", [] { log().start(); });
  m.def("stop", [] {
    py::list all;
    for (auto& r : log().stop())
      all.append(py::make_tuple(r.kind, r.name, r.device, r.stream, r.a, r.b, r.accesses));
    return all;
  });
  m.def("locate_syncs", [](py::object where) { log().where = where; });
  m.def("launch", &launch);
  m.def("note", [](std::string kind, int device, int64_t stream, int64_t a) {
    auto key = stream_key(device, stream);
    if (kind == "record")
      note_record(device, key, a);
    else if (kind == "wait")
      note_wait(device, key, a);
    else
      log().add({kind, "", device, key, a});
  });
  // Python's lock may be wanted by what waits.
  m.def("synchronize", [](std::string name, int device, int64_t a, int64_t stream) {
    synchronize(name, device, a, stream_key(device, stream));
  });
  m.def("arrive", [](int device, int64_t event, int64_t stream) {
    arrive(event, event ? 0 : stream_key(device, stream));
  });
  m.def("new_stream", [] { return machine().next_stream++; });
  m.def("new_event", [] { return machine().next_event++; });
  m.def("device", [] { return here().device; });
  m.def("set_device", &set_device);
  m.def("stream", [](int device) { return here().streams.at(device); });
  m.def("set_stream", [](int device, int64_t stream) { here().streams.at(device) = stream; });
  m.def("used", [](int device) { return memory().used(device); });
  m.def("peak", [](int device, bool reset) { return memory().peak(device, reset); });
  m.def("capacity", [] { return machine().capacity; });
  m.def("devices", [] { return machine().devices; });
  m.def("begin_capture", &begin_capture);
  m.def("end_capture", &end_capture);
  m.def("is_capturing", [] { return (bool)capturing(); });
  m.def("replay", &replay);
  m.def("forget_graph", [](int64_t id) { graphs().erase(id); });
  m.def("as_cpu", &as_cpu);
  m.def("as_device", [](const Tensor& t, int device) { return as_device(t.contiguous(), device); });
}
