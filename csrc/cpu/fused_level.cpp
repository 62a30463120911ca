// cpu/fused_level.cpp: the one source of the fused kernels, compiled once per ISA level like cpu/level.cpp, and for its reason.
#include "level.h"

#include "fused_activations.h"
#include "fused_norm.h"

namespace tpk::cpu {
namespace TPK_NAMESPACE {
namespace {

template <class Element>
constexpr FusedKernels table{Norm<Element>::forward,   Norm<Element>::backward, Turn<Element>::rows,         Gated<Element>::forward,
                             Gated<Element>::backward, Sum<Element>::rows,      Conversion<Element>::narrow, Conversion<Element>::widen};

} // namespace
} // namespace TPK_NAMESPACE

const FusedKernels* TPK_FUSED_KERNELS(DType dtype) {
  switch (dtype) {
  case DType::bfloat16:
    return &TPK_NAMESPACE::table<TPK_NAMESPACE::Bfloat16>;
  case DType::float16:
    return &TPK_NAMESPACE::table<TPK_NAMESPACE::Float16>;
  default:
    return &TPK_NAMESPACE::table<float>;
  }
}

} // namespace tpk::cpu
