// What this machine can do at most: the ceilings that benchmarks are held against.

#include <atomic>

#include "isa.h"
#include "kernels.h"

namespace attnplat_cpu {
namespace {

struct Reading {
  const Kernels *kernels;
  const char *data;
  int64_t bytes, pieces;
  std::atomic<uint64_t> sum{0};
};

void read_pieces(int64_t begin, int64_t end, void *context) {
  Reading &r = *static_cast<Reading *>(context);
  for (int64_t n = begin; n < end; n++) {
    int64_t from = r.bytes / r.pieces * n / 64 * 64;
    int64_t to = n + 1 == r.pieces ? r.bytes : r.bytes / r.pieces * (n + 1) / 64 * 64;
    r.sum.fetch_add(r.kernels->read(r.data + from, to - from), std::memory_order_relaxed);
  }
}

}  // namespace
}  // namespace attnplat_cpu

extern "C" uint64_t attnplat_cpu_read(int32_t isa, const void *data, int64_t bytes,
                                      int64_t workers, attnplat_cpu_parallel_for parallel_for) {
  using namespace attnplat_cpu;
  Reading reading{isa_kernels(isa), static_cast<const char *>(data), bytes, workers, {0}};
  if (!reading.kernels) return 0;
  if (workers > 1 && parallel_for)
    parallel_for(0, workers, 1, read_pieces, &reading);
  else
    read_pieces(0, workers, &reading);
  return reading.sum.load();
}

namespace attnplat_cpu {
namespace {

struct Multiplying {
  const Kernels *kernels;
  int64_t rounds;
  std::atomic<int64_t> operations{0};
};

void multiply_shares(int64_t begin, int64_t end, void *context) {
  Multiplying &m = *static_cast<Multiplying *>(context);
  m.kernels->enter();
  for (int64_t n = begin; n < end; n++)
    m.operations.fetch_add(m.kernels->multiply(m.rounds), std::memory_order_relaxed);
  m.kernels->leave();
}

}  // namespace
}  // namespace attnplat_cpu

extern "C" int64_t attnplat_cpu_multiply(int32_t isa, int64_t rounds, int64_t workers,
                                         attnplat_cpu_parallel_for parallel_for) {
  using namespace attnplat_cpu;
  Multiplying multiplying{isa_kernels(isa), rounds, {0}};
  if (!multiplying.kernels) return 0;
  if (workers > 1 && parallel_for)
    parallel_for(0, workers, 1, multiply_shares, &multiplying);
  else
    multiply_shares(0, workers, &multiplying);
  return multiplying.operations.load();
}
