// bindings/links.h: the shared-memory links' parts of tpkernels._core.
#pragma once

#include <pybind11/pybind11.h>

void bind_beat(pybind11::module_& m);
void bind_links(pybind11::module_& m);
