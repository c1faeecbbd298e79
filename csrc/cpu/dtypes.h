// Storage types for dtypes.
#pragma once

#include "../host/launch.h"
#include "types.h"

namespace preact_kernels {

// Calls body(T{}) for the storage type T of a dtype that is accumulated in float32.
template <class Body>
auto for_single_dtype(ScalarType dtype, const Body& body) {
  if (dtype == ScalarType::Float) return body(float{});
  if (dtype == ScalarType::Half) return body(Float16{});
  PK_CHECK(dtype == ScalarType::BFloat16, "x: expected dtype ", kDtypes);
  return body(BFloat16{});
}

// Calls body(T{}) for the storage type T of a dtype.
template <class Body>
auto for_dtype(ScalarType dtype, const Body& body) {
  if (dtype == ScalarType::Double) return body(double{});
  return for_single_dtype(dtype, body);
}

}  // namespace preact_kernels
