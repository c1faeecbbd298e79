// Matrix instructions by their definition in PTX, and approximations with the largest error that it
// allows.

#include "device.h"

namespace preact_kernels::cuda {

using cuda_on_host::kAllLanes;
using cuda_on_host::Site;

namespace {

// See ldmatrix_x4 in csrc/cuda/device.cuh.
void load_matrices(const char* name, bool is_transposed, uint32_t* r, const void* row, Site site) {
  struct Operands {
    const void* row;
    uint32_t* r;
  } own = {row, r};
  cuda_on_host::check_shared(row, 16, name);
  cuda_on_host::collective(name, kAllLanes, site, own, [=](Operands** lanes) {
    for (int m = 0; m < 4; ++m) {
      uint16_t matrix[8][8];
      for (int i = 0; i < 8; ++i) std::memcpy(matrix[i], lanes[8 * m + i]->row, 16);
      for (int l = 0; l < 32; ++l) {
        const int i = l / 4, j = 2 * (l % 4);
        const uint32_t low = is_transposed ? matrix[j][i] : matrix[i][j];
        const uint32_t high = is_transposed ? matrix[j + 1][i] : matrix[i][j + 1];
        lanes[l]->r[m] = low | high << 16;
      }
    }
  });
}

// d += a * b for a [16, K] and b [K, 8], spread over a warp: `kPack` elements per register. Let
// group = l / 4 and rank = l % 4 for lane l. The registers of a hold rows group and group + 8 of
// the first half of K, then of the second. The registers of b hold column group of the first half,
// then of the second. The registers of d hold columns 2 * rank and 2 * rank + 1 of row group, then
// of row group + 8.
template <int kPack, class Unpack>
void multiply(const char* name, float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
              Site site, const Unpack& unpack) {
  struct Operands {
    float* d;
    const uint32_t *a, *b;
  } own = {d, a, b};
  cuda_on_host::collective(name, kAllLanes, site, own, [&](Operands** lanes) {
    constexpr int kK = 8 * kPack;
    double left[16][kK], right[kK][8];
    for (int l = 0; l < 32; ++l) {
      const int group = l / 4, rank = l % 4;
      for (int half = 0; half < 2; ++half) {
        const int k = half * kK / 2 + rank * kPack;
        double column[kPack];
        unpack(lanes[l]->a[2 * half], &left[group][k]);
        unpack(lanes[l]->a[2 * half + 1], &left[group + 8][k]);
        unpack(lanes[l]->b[half], column);
        for (int i = 0; i < kPack; ++i) right[k + i][group] = column[i];
      }
    }
    for (int row = 0; row < 16; ++row) {
      float* of_lanes[4];
      double sums[8];
      for (int rank = 0; rank < 4; ++rank) {
        of_lanes[rank] = lanes[row % 8 * 4 + rank]->d + row / 8 * 2;
        for (int i = 0; i < 2; ++i) sums[2 * rank + i] = of_lanes[rank][i];
      }
      for (int k = 0; k < kK; ++k) {
        for (int i = 0; i < 8; ++i) sums[i] += left[row][k] * right[k][i];
      }
      for (int i = 0; i < 8; ++i) of_lanes[i / 2][i % 2] = static_cast<float>(sums[i]);
    }
  });
}

}  // namespace

void ldmatrix_x4(uint32_t (&r)[4], const void* row, const char* file, int line) {
  load_matrices("ldmatrix_x4", false, r, row, {file, line});
}
void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row, const char* file, int line) {
  load_matrices("ldmatrix_x4_trans", true, r, row, {file, line});
}

template <class T>
void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], T,
                  const char* file, int line) {
  multiply<2>("mma_m16n8k16", d, a, b, {file, line}, [](uint32_t pair, double* values) {
    const float2 both = unpack_pair<T>(pair);
    values[0] = both.x, values[1] = both.y;
  });
}
template void mma_m16n8k16(float (&)[4], const uint32_t (&)[4], const uint32_t (&)[2], BFloat16,
                           const char*, int);
template void mma_m16n8k16(float (&)[4], const uint32_t (&)[4], const uint32_t (&)[2], Half,
                           const char*, int);

void mma_m16n8k8_tf32(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                      const char* file, int line) {
  for (const uint32_t bits : {a[0], a[1], a[2], a[3], b[0], b[1]}) {
    // The hardware cuts bits off: numbers would be less exact, and a NaN may become infinite.
    if (bits & 0x1fffu) {
      cuda_on_host::fail("mma_m16n8k8_tf32: an operand that to_tf32 did not round");
    }
  }
  multiply<1>("mma_m16n8k8_tf32", d, a, b, {file, line},
              [](uint32_t bits, double* value) { *value = __uint_as_float(bits); });
}

// As cvt.rna.tf32.f32 compiled for compute capabilities 8.0 to 9.0.
uint32_t to_tf32(float value) {
  const uint32_t bits = __float_as_uint(value);
  return (std::isfinite(value) ? bits + 0x1000u : bits) & ~0x1fffu;
}

namespace {

float without_subnormal(float value) {
  return std::fabs(value) < 0x1p-126f ? std::copysign(0.0f, value) : value;
}

// `exact`, off by `error` in a direction that depends on the bits of `of`.
float off_by(double error, double exact, float of) {
  const bool is_up = __float_as_uint(of) * 0x9e3779b9u >> 31;
  return without_subnormal(static_cast<float>(is_up ? exact + error : exact - error));
}

}  // namespace

float approximate_exp2(float x) {
  const double exact = std::exp2(double(without_subnormal(x)));
  return off_by(exact < 0x1p128 ? exact * 0x1p-22 : 0, exact, x);
}
float approximate_reciprocal(float x) {
  const double exact = 1 / double(without_subnormal(x));
  return off_by(std::isinf(exact) ? 0 : exact * 0x1p-23, exact, x);
}
float approximate_log2(float x) {
  const double exact = std::log2(double(without_subnormal(x)));
  const bool is_near_one = x > 0.5f && x < 2;
  return off_by(std::isfinite(exact) ? (is_near_one ? 1 : std::fabs(exact)) * 0x1p-22 : 0, exact,
                x);
}

}  // namespace preact_kernels::cuda
