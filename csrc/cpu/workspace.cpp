#include "../host/workspace.h"

namespace preact_kernels {

// Empty: each kernel writes its own results.
struct Workspace {};
std::shared_ptr<Workspace> new_workspace(const Tensor&, ScalarType, const std::vector<Tensor>&,
                                         int64_t) {
  return std::make_shared<Workspace>();
}
Accumulators sums_of(const Workspace&) { return {}; }
void finish_statistics(Workspace&, const Tensor&, const Tensor&, int64_t) {}
void finish_gradients(Workspace&, const Tensor&, const Tensor&) {}

}  // namespace preact_kernels
