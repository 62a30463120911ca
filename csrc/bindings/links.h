// bindings/links.h: the shared-memory ring's part of tpkernels._core.
#pragma once

#include <pybind11/pybind11.h>

void bind_links(pybind11::module_& m);
