// What the code of every compiled graph includes; precompiled once (chunkc/inductor.py). Inductor would precompile the
// first of the two alone, and the second one, with vectors of all kinds, takes longer to read than a layer to compile.
#pragma once

#include <torch/csrc/inductor/cpp_wrapper/cpu.h>

#include <torch/csrc/inductor/cpp_prefix.h>
