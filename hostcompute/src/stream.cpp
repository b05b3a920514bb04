// Work that only moves bytes: whole units into a staging block, and the read-bandwidth probe.
#include "stream.h"

#include <algorithm>
#include <atomic>

#include "ffn.h"

namespace {

constexpr int64_t word = 64;

// Thread t's share of a range of bytes, cut between cache lines.
struct Share {
  int64_t begin;
  int64_t end;
};

Share share(int64_t bytes, int thread, int threads) {
  const int64_t lines = (bytes + word - 1) / word;
  return {std::min(bytes, lines * thread / threads * word), std::min(bytes, lines * (thread + 1) / threads * word)};
}

struct Gather {
  Pool& pool;
  const Kernels& kernels;
  const char* data;
  int64_t unit_bytes;
  const int32_t* units;
  int64_t count;
  char* out;
};

struct Sum {
  Pool& pool;
  const Kernels& kernels;
  const char* data;
  int64_t bytes;
  std::atomic<uint64_t> total{0};
};

}  // namespace

void gather(Pool& pool, const Kernels& kernels, const hc_arena& arena, const int32_t* units, int64_t count, void* out) {
  const int64_t unit_bytes = arena.stride;
  Gather job{pool, kernels, static_cast<const char*>(arena.data), unit_bytes, units, count, static_cast<char*>(out)};
  // Each thread fills one contiguous piece of the result; a large unit may be cut between two threads.
  const auto task = [](void* context, int thread) {
    const Gather& job = *static_cast<Gather*>(context);
    const Share piece = share(job.count * job.unit_bytes, thread, job.pool.threads());
    for (int64_t at = piece.begin; at < piece.end;) {
      const int64_t unit = at / job.unit_bytes;
      const int64_t inside = at - unit * job.unit_bytes;
      const int64_t bytes = std::min(job.unit_bytes - inside, piece.end - at);
      job.kernels.copy(job.out + at, job.data + job.units[unit] * job.unit_bytes + inside, bytes);
      at += bytes;
    }
  };
  pool.run(task, &job);
}

uint64_t read_sum(Pool& pool, const Kernels& kernels, const void* data, int64_t bytes) {
  Sum job{pool, kernels, static_cast<const char*>(data), bytes};
  const auto task = [](void* context, int thread) {
    Sum& job = *static_cast<Sum*>(context);
    const Share piece = share(job.bytes, thread, job.pool.threads());
    job.total.fetch_add(job.kernels.read_sum(job.data + piece.begin, piece.end - piece.begin));
  };
  pool.run(task, &job);
  return job.total.load();
}
