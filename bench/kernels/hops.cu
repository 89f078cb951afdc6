// What it costs to pass work between multiprocessors inside one kernel. Built and driven by hops.py.
//
// A hop: every block stores what it has, signals, waits until all producers have signalled, and loads what they stored.

#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

namespace {

constexpr int kThreads = 256;
constexpr int kLine = 32;  // words: cells that are polled by many lie on lines of their own
constexpr int kStored = 16;  // floats that a block stores a round: 64 bytes
constexpr int kUnit = 16384, kSlots = 12;

void check(cudaError_t status) {
  if (status != cudaSuccess) {
    std::fprintf(stderr, "%s\n", cudaGetErrorString(status));
    std::exit(1);
  }
}

__device__ unsigned acquire(const unsigned* cell) {
  unsigned value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(cell) : "memory");
  return value;
}

__device__ void signal(unsigned* cell) {
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(cell) : "memory");
}

__device__ void wait_for(const unsigned* cell, unsigned target, int sleep) {
  while (acquire(cell) < target) {
    if (sleep > 0) __nanosleep(sleep);
  }
}

struct Hop {
  unsigned* cells;  // a line for each round and each producer
  unsigned* joins;  // a line for each round and each group that adds up
  float* partials;
  float* data;
  int producers;
  int joiners;  // how many blocks share outputs; the last of them adds them up
  int sleep;
  bool apart;  // whether each producer has a cell of its own

  __device__ unsigned* cell(int round, int producer) const {
    return cells + (static_cast<size_t>(round) * producers + (apart ? producer : 0)) * kLine;
  }
};

__device__ void sync_consumers() { asm volatile("bar.sync 1, 256;" ::: "memory"); }

// Run by the first 256 threads. Returns something that depends on what was loaded.
__device__ float hop(const Hop& how, int round, float value) {
  __shared__ bool is_last;
  const int block = blockIdx.x, thread = threadIdx.x;
  float* page = how.data + (round & 1) * gridDim.x * kStored;
  bool signals = block < how.producers;
  if (how.joiners > 1 && signals) {
    const int group = block / how.joiners;
    float* partial = how.partials + ((round & 1) * gridDim.x + block) * 64;
    if (thread < 64) partial[thread] = value;
    sync_consumers();
    if (thread == 0) {
      unsigned* join = how.joins + (static_cast<size_t>(round) * gridDim.x + group) * kLine;
      unsigned before;
      asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(join) : "memory");
      is_last = before == how.joiners - 1;
    }
    sync_consumers();
    signals = is_last;
    if (signals && thread < 64) {
      for (int other = 0; other < how.joiners; ++other) {
        value += __ldcg(how.partials + ((round & 1) * gridDim.x + group * how.joiners + other) * 64 + thread);
      }
    }
  }
  if (signals && thread < kStored) page[block * kStored + thread] = value;
  sync_consumers();
  if (signals && thread == 0) {
    __threadfence();
    signal(how.cell(round, block));
  }
  if (how.apart) {
    if (thread < how.producers) wait_for(how.cell(round, thread), 1, how.sleep);
  } else if (thread == 0) {
    wait_for(how.cell(round, 0), how.producers / how.joiners, how.sleep);
  }
  sync_consumers();
  // 4 KB of what others stored, past the first cache.
  const int lines = how.producers * kStored / 4;
  return __ldcg(reinterpret_cast<const float4*>(page) + (thread + 4 * block) % lines).x;
}

__global__ void hops(Hop how, int rounds, long long* times, float* out) {
  float value = 1;
  for (int round = 0; round < rounds; ++round) {
    value += hop(how, round, value);
    if (threadIdx.x == 0 && blockIdx.x == 0) times[round] = clock64();
  }
  if (value == -1) *out = value;
}

__device__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ void wait_barrier(uint64_t* barrier, unsigned parity) {
  asm volatile(
      "{\n.reg .pred done;\nwaiting: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra waiting;\n}" ::"r"(
          shared_address(barrier)),
      "r"(parity)
      : "memory");
}

__device__ void arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Each block streams units of 16 KB through a ring that a warp of its own fills, with a hop after every so many.
__global__ void ring(const char* weights, int units, int every, Hop how, float* out) {
  extern __shared__ __align__(128) char slots[];
  __shared__ uint64_t full[kSlots], empty[kSlots];
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < kSlots; ++slot) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(full + slot)));
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 8;" ::"r"(shared_address(empty + slot)));
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (threadIdx.x >= kThreads) {
    if (threadIdx.x != kThreads) return;
    for (int unit = 0; unit < units; ++unit) {
      const int slot = unit % kSlots;
      if (unit >= kSlots) wait_barrier(empty + slot, (unit / kSlots - 1) & 1);
      const char* source = weights + (static_cast<size_t>(unit) * gridDim.x + blockIdx.x) * kUnit;
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(full + slot)),
                   "r"(kUnit)
                   : "memory");
      asm volatile(
          "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
              shared_address(slots + slot * kUnit)),
          "l"(source), "r"(kUnit), "r"(shared_address(full + slot))
          : "memory");
    }
    return;
  }
  float value = 0;
  for (int unit = 0; unit < units; ++unit) {
    const int slot = unit % kSlots;
    wait_barrier(full + slot, (unit / kSlots) & 1);
    const float4* words = reinterpret_cast<const float4*>(slots + slot * kUnit);
    for (int part = 0; part < kUnit / 16 / kThreads; ++part) {
      const float4 word = words[part * kThreads + threadIdx.x];
      value += word.x + word.y + word.z + word.w;
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive(empty + slot);
    if (every > 0 && (unit + 1) % every == 0) value += hop(how, unit / every, value);
  }
  if (value == -1) *out = value;
}

// What a kernel boundary costs that overlaps by programmatic launch: the same stores and loads, a round a kernel.
__global__ void boundary(float* data, int round, float* out) {
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
  const float* before = data + ((round + 1) & 1) * gridDim.x * kStored;
  const float value =
      __ldcg(reinterpret_cast<const float4*>(before) + (threadIdx.x + 4 * blockIdx.x) % (gridDim.x * kStored / 4)).x;
  if (threadIdx.x < kStored) data[(round & 1) * gridDim.x * kStored + blockIdx.x * kStored + threadIdx.x] = value + 1;
  if (value == -1) *out = value;
}

template <typename Body>
float best_milliseconds(cudaStream_t stream, Body body) {
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin));
  check(cudaEventCreate(&end));
  float best = 1e30f;
  for (int turn = 0; turn < 6; ++turn) {
    body(begin, end);
    check(cudaStreamSynchronize(stream));
    float taken;
    check(cudaEventElapsedTime(&taken, begin, end));
    if (turn > 0 && taken < best) best = taken;
  }
  return best;
}

struct Memory {
  Hop how{};
  size_t cell_bytes = 0, join_bytes = 0;
  float* out = nullptr;

  Memory(int blocks, int rounds, int producers, int joiners, int sleep, bool apart) {
    how.producers = producers;
    how.joiners = joiners;
    how.sleep = sleep;
    how.apart = apart;
    cell_bytes = static_cast<size_t>(rounds + 1) * producers * kLine * 4;
    join_bytes = static_cast<size_t>(rounds + 1) * blocks * kLine * 4;
    check(cudaMalloc(&how.cells, cell_bytes));
    check(cudaMalloc(&how.joins, join_bytes));
    check(cudaMalloc(&how.partials, 2 * blocks * 64 * 4));
    check(cudaMalloc(&how.data, 2 * blocks * kStored * 4));
    check(cudaMemset(how.data, 0, 2 * blocks * kStored * 4));
    check(cudaMalloc(&out, 4));
  }
  void clear(cudaStream_t stream) {
    check(cudaMemsetAsync(how.cells, 0, cell_bytes, stream));
    check(cudaMemsetAsync(how.joins, 0, join_bytes, stream));
  }
  ~Memory() {
    for (void* each : {static_cast<void*>(how.cells), static_cast<void*>(how.joins), static_cast<void*>(how.partials),
                       static_cast<void*>(how.data), static_cast<void*>(out)}) {
      cudaFree(each);
    }
  }
};

}  // namespace

// Microseconds a round; the clocks at the end of each round of block 0 go to `clocks`.
extern "C" float time_hops(int blocks, int rounds, int producers, int joiners, int sleep, int apart, long long* clocks) {
  cudaStream_t stream;
  check(cudaStreamCreate(&stream));
  Memory memory(blocks, rounds, producers, joiners, sleep, apart != 0);
  long long* times;
  check(cudaMalloc(&times, rounds * sizeof(long long)));
  const float taken = best_milliseconds(stream, [&](cudaEvent_t begin, cudaEvent_t end) {
    memory.clear(stream);
    check(cudaEventRecord(begin, stream));
    hops<<<blocks, kThreads, 0, stream>>>(memory.how, rounds, times, memory.out);
    check(cudaGetLastError());
    check(cudaEventRecord(end, stream));
  });
  check(cudaMemcpy(clocks, times, rounds * sizeof(long long), cudaMemcpyDeviceToHost));
  cudaFree(times);
  cudaStreamDestroy(stream);
  return taken * 1000 / rounds;
}

// Microseconds of streaming `units` of 16 KB a block, with a hop after every so many.
extern "C" float time_ring(int blocks, int units, int every, int joiners, int sleep) {
  cudaStream_t stream;
  check(cudaStreamCreate(&stream));
  const int rounds = every > 0 ? units / every + 1 : 1;
  Memory memory(blocks, rounds, blocks, joiners, sleep, false);
  char* weights;
  check(cudaMalloc(&weights, static_cast<size_t>(units) * blocks * kUnit));
  check(cudaMemset(weights, 0, static_cast<size_t>(units) * blocks * kUnit));
  check(cudaFuncSetAttribute(ring, cudaFuncAttributeMaxDynamicSharedMemorySize, kSlots * kUnit));
  const float taken = best_milliseconds(stream, [&](cudaEvent_t begin, cudaEvent_t end) {
    memory.clear(stream);
    check(cudaEventRecord(begin, stream));
    ring<<<blocks, kThreads + 32, kSlots * kUnit, stream>>>(weights, units, every, memory.how, memory.out);
    check(cudaGetLastError());
    check(cudaEventRecord(end, stream));
  });
  cudaFree(weights);
  cudaStreamDestroy(stream);
  return taken * 1000;
}

// Microseconds a kernel, in a graph of `kernels`; with programmatic launch, or without.
extern "C" float time_boundaries(int blocks, int kernels, int programmatic) {
  cudaStream_t stream;
  check(cudaStreamCreate(&stream));
  Memory memory(blocks, 1, blocks, 1, 0, false);
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = programmatic ? 1 : 0;
  cudaGraph_t graph;
  cudaGraphExec_t executable;
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  for (int kernel = 0; kernel < kernels; ++kernel) {
    check(cudaLaunchKernelEx(&config, boundary, memory.how.data, kernel, memory.out));
  }
  check(cudaStreamEndCapture(stream, &graph));
  check(cudaGraphInstantiate(&executable, graph, 0));
  const float taken = best_milliseconds(stream, [&](cudaEvent_t begin, cudaEvent_t end) {
    check(cudaEventRecord(begin, stream));
    check(cudaGraphLaunch(executable, stream));
    check(cudaEventRecord(end, stream));
  });
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
  return taken * 1000 / kernels;
}
