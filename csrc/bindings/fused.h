// bindings/fused.h: adds the fused kernels to tpkernels._core.
#pragma once

#include <pybind11/pybind11.h>

void bind_fused(pybind11::module_& m);
