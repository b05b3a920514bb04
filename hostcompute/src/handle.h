// What the pools of the C interface share: one set of threads for each number of them, however many handles ask for
// it, since two that spin would keep each other off the cores.
#pragma once

#include <memory>

#include "kernels.h"
#include "pool.h"

struct Handle {
  std::shared_ptr<Pool> pool;
  const Kernels* kernels;
};

// Throws std::system_error or std::bad_alloc.
Handle* open_handle(int threads, const Kernels* kernels);
void close_handle(Handle* handle);

// For work that names no handle. That of the handle opened first among those that are open: an engine keeps its
// threads whatever opens and closes beside it. Where none is open, threads of its own, as many as
// `set_fallback` said. The copy keeps the threads alive. Throws as `open_handle`.
Handle common_handle();
void set_fallback(int threads, const Kernels* kernels);
