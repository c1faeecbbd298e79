// Runs an op's calls of torch in the order of the stream. The linker sends the calls here (--wrap).

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/c/shim.h>

#include <string>

#include "grid.h"

extern "C" {

AOTITorchError __real_torch_call_dispatcher(const char*, const char*, StableIValue*, uint64_t);
AOTITorchError __real_aoti_torch_delete_tensor_object(AtenTensorHandle);

// A kernel of torch runs after all launches before it.
AOTITorchError __wrap_torch_call_dispatcher(const char* op, const char* overload,
                                            StableIValue* stack, uint64_t version) {
  const std::string name = op;
  const bool has_kernel =
      name != "aten::empty" && name != "aten::empty_like" && name != "aten::view";
  if (has_kernel) cuda_on_host::synchronize();
  return __real_torch_call_dispatcher(op, overload, stack, version);
}

AOTITorchError __wrap_aoti_torch_delete_tensor_object(AtenTensorHandle tensor) {
  if (cuda_on_host::is_idle()) return __real_aoti_torch_delete_tensor_object(tensor);
  cuda_on_host::keep(std::shared_ptr<void>(tensor, [](void* kept) {
    __real_aoti_torch_delete_tensor_object(static_cast<AtenTensorHandle>(kept));
  }));
  return AOTI_TORCH_SUCCESS;
}

}  // extern "C"
