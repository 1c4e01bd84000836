// The fabric of GPUs: a thread block puts, its first thread signals. Stores reach peers whose
// memory is mapped here (NVLink, PCIe); NVSHMEM, where it was compiled in, reaches the others.
#pragma once

#ifdef DISTCA_NVSHMEM
#include <nvshmem.h>
#include <nvshmemx.h>
#endif

#include "exchange.h"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define DISTCA_BULK_COPY
#include "bulk_copy.cuh"
#endif

namespace distca {

// Arguments that all of a rank's kernels share, in its device memory. Words only: Python packs them.
struct Rank {
  Word rank, ranks;
  char* control;          // this rank's control memory
  char* arenas;           // this rank's receive arenas
  char* const* controls;  // control memory of each rank, as mapped here; null: not mapped
  char* const* arenas_of;  // receive arenas of each rank, likewise
  unsigned* complete;     // parts of messages that are complete: of each channel and peer
  unsigned* failed;       // 1 once a kernel of this rank has failed
  Failure* failure;       // in host memory
  Word timeout_ns;
};

__device__ __forceinline__ Word load_acquire(const char* flag) {
  Word value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(flag) : "memory");
  return value;
}

__device__ __forceinline__ void store_release(char* flag, Word value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(flag), "l"(value) : "memory");
}

__device__ __forceinline__ Word nanoseconds() {
  Word now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

// Copies the whole `Unit`s of [begin, end) by all threads of the block, and returns where they end.
// Both pointers are aligned to a `Unit` at `begin`.
template <class Unit>
__device__ __forceinline__ Word copy_units(char* to, const char* from, Word begin, Word end) {
  const Word units = (end - begin) / sizeof(Unit);
  Unit* target = reinterpret_cast<Unit*>(to + begin);
  const Unit* source = reinterpret_cast<const Unit*>(from + begin);
  const Word stride = blockDim.x;
  Word i = threadIdx.x;
  // Wide loads hide their latency four at a time; narrower units copy few bytes.
  for (; sizeof(Unit) == 16 && i + 3 * stride < units; i += 4 * stride) {
    const Unit first = source[i], second = source[i + stride];
    const Unit third = source[i + 2 * stride], fourth = source[i + 3 * stride];
    target[i] = first;
    target[i + stride] = second;
    target[i + 2 * stride] = third;
    target[i + 3 * stride] = fourth;
  }
  for (; i < units; i += stride) target[i] = source[i];
  return begin + units * sizeof(Unit);
}

// Copies by all threads of the block, in the widest units that both pointers' alignment allows.
__device__ __forceinline__ void copy_bytes(char* to, const char* from, Word bytes) {
  const Word apart = (Word(to) ^ Word(from)) & 15;
  const Word unit = apart == 0 ? 16 : (apart & 3) == 0 ? 4 : 1;
  const Word head = (unit - (Word(to) & (unit - 1))) & (unit - 1);
  Word done = copy_units<char>(to, from, 0, head < bytes ? head : bytes);
  if (unit == 16) {
    done = copy_units<uint4>(to, from, done, bytes);
  } else if (unit == 4) {
    done = copy_units<unsigned>(to, from, done, bytes);
  }
  copy_units<char>(to, from, done, bytes);
}

class DeviceFabric {
 public:
  __device__ DeviceFabric(const Rank& me, int channel) : channel_(channel), me_(me) {}

  __device__ int rank() const { return int(me_.rank); }
  __device__ int ranks() const { return int(me_.ranks); }
  __device__ bool maps(int peer) const { return me_.arenas_of[peer] != nullptr; }
  __device__ bool leads() const { return threadIdx.x == 0; }
  __device__ Outcome shared(Outcome outcome) const {
    __shared__ Outcome of_leader;
    if (leads()) of_leader = outcome;
    __syncthreads();
    const Outcome found = of_leader;
    // No thread may overwrite it before all have read it.
    __syncthreads();
    return found;
  }
  __device__ void all_put() const { __syncthreads(); }

  // Only for peers whose memory is mapped: `put_and_set` orders what it does.
  __device__ void fence(int) const { __threadfence_system(); }

  __device__ void set(int peer, Word flag, Word value) const {
    char* mapped = me_.controls[peer];
    if (mapped != nullptr) {
      store_release(mapped + flag, value);
      return;
    }
#ifdef DISTCA_NVSHMEM
    nvshmemx_signal_op(reinterpret_cast<Signal*>(me_.control + flag), value, NVSHMEM_SIGNAL_SET,
                       peer);
#endif
  }

  __device__ bool last_part(int peer, int parts) const {
    unsigned* complete = me_.complete + Word(channel_) * me_.ranks + peer;
    __threadfence();
    const bool last = atomicAdd(complete, 1u) == unsigned(parts) - 1;
    if (last) *complete = 0;
    __threadfence();
    return last;
  }

  __device__ Outcome wait_for(int peer, Word flag, Word value) const {
    const Word started = nanoseconds();
    while (load_acquire(me_.control + flag) < value) {
      if (load_acquire(me_.control + kAbortWord) != 0) return Outcome::aborted;
      if (nanoseconds() - started > me_.timeout_ns) return Outcome::timed_out;
      __nanosleep(100);
    }
#ifdef DISTCA_NVSHMEM
    // A flag that a network card wrote does not order the data before it on every machine: NVSHMEM's
    // own test of the flag does.
    if (!maps(peer)) {
      nvshmem_uint64_test(reinterpret_cast<Signal*>(me_.control + flag), NVSHMEM_CMP_GE, value);
    }
#else
    (void)peer;
#endif
    return Outcome::done;
  }

  // Ends the exchange on all ranks; the first failure of this rank is kept for its program.
  __device__ void fail(Outcome outcome, int peer, bool sending, Word epoch) const {
    if (outcome != Outcome::aborted) {
      const Word why = abort_word(outcome, rank(), peer);
      for (int other = 0; other < ranks(); ++other) set(other, kAbortWord, why);
    }
    // In device memory, since a GPU's atomics on host memory are not atomic on every machine.
    if (atomicExch(me_.failed, 1u) != 0) return;
    me_.failure->peer = Word(peer);
    me_.failure->sending = sending;
    me_.failure->channel = channel_;
    me_.failure->epoch = epoch;
    me_.failure->abort = load_acquire(me_.control + kAbortWord);
    __threadfence_system();
    // Stored last: the program reads the rest once this is not 0.
    *reinterpret_cast<volatile Word*>(&me_.failure->outcome) = Word(outcome);
  }

 private:
  const int channel_;

 protected:
#ifdef DISTCA_NVSHMEM
  using Signal = unsigned long;
  static_assert(sizeof(Signal) == sizeof(Word), "a signal holds an epoch");
#endif

  const Rank& me_;
};

// The fabric that also puts.
class SendingFabric : public DeviceFabric {
 public:
  // `bulk`: by the tensor memory accelerator, on GPUs that have one.
  __device__ SendingFabric(const Rank& me, int channel, bool bulk)
      : DeviceFabric(me, channel), bulk_(bulk) {}

  __device__ void put(int peer, Word to, const char* from, Word bytes) {
    char* there = me_.arenas_of[peer] + to;
    if (!put_in_bulk(there, from, bytes)) copy_bytes(there, from, bytes);
  }

#ifdef DISTCA_NVSHMEM
  // Does not block, so that network cards work while blocks copy to mapped peers. NVSHMEM delivers
  // the flag of such a put after its data.
  __device__ void put_and_set(int peer, Word to, const char* from, Word bytes, Word flag,
                              Word value) const {
    if (bytes == 0) {
      if (leads()) set(peer, flag, value);
      return;
    }
    nvshmemx_putmem_signal_nbi_block(me_.arenas + to, from, bytes,
                                     reinterpret_cast<Signal*>(me_.control + flag), value,
                                     NVSHMEM_SIGNAL_SET, peer);
  }

  // Waits until this block's `put_and_set`s are complete, and their staging may be used again.
  __device__ void finish_puts() const {
    if (leads()) nvshmem_quiet();
  }
#endif

 private:
#ifdef DISTCA_BULK_COPY
  // Copies in bulk if it can; false: nothing was done. The block's first thread, which signals,
  // waits for its copy.
  __device__ bool put_in_bulk(char* to, const char* from, Word bytes) {
    const BulkPart part = bulk_part(to, from, bytes);
    if (!bulk_ || part.begin == part.end) return false;
    copy_units<char>(to, from, 0, part.begin);
    copy_units<char>(to, from, part.end, bytes);
    if (leads()) bulk_copy_.copy(to + part.begin, from + part.begin, part.end - part.begin);
    return true;
  }

  BulkCopy<TensorMemoryAccelerator> bulk_copy_{TensorMemoryAccelerator()};
#else
  __device__ bool put_in_bulk(char*, const char*, Word) { return false; }
#endif

  const bool bulk_;
};

}  // namespace distca
