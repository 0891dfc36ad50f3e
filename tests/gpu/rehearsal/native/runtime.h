// What the sources of the fake runtime share.
#pragma once
#include <cuda_runtime_api.h>

#include "fake.h"
using namespace fk;
#define API api(__func__)
#define R(x) return done(x)
FK void fakegpu_make_current();  // of libcuda
cudaError_t done(int code);      // keeps it for cudaGetLastError
