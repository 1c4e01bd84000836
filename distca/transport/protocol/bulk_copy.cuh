// The tensor memory accelerator, which GPUs have from compute capability 9.0 (Hopper) on. One thread
// starts its copies; no registers and no other threads take part. The instructions are written out,
// since CUDA's headers for them (<cuda/ptx>) are not there for NVRTC by themselves.
#pragma once

#include "bulk_copy.h"

namespace distca {

class TensorMemoryAccelerator {
 public:
  // Once in a kernel, by all threads of a block; its first thread alone may then use it.
  __device__ TensorMemoryAccelerator() : ring_(ring_of_block()) {
    if (threadIdx.x != 0) return;
    for (Word& loaded : ring_.loaded) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared(&loaded)) : "memory");
    }
  }

  // The accelerator accesses memory by another proxy than threads do. Without a fence between them
  // it need not see the barriers' initial values, nor the receiver's release of its arena, which
  // this thread has acquired.
  __device__ void begin() const { asm volatile("fence.proxy.async;" ::: "memory"); }

  // A slot's barrier completes a phase when this thread has arrived and all bytes have.
  __device__ void load(unsigned slot, const char* from, unsigned bytes) const {
    const unsigned loaded = shared(&ring_.loaded[slot]);
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(loaded), "r"(bytes)
                 : "memory");
    // The cluster is this block alone, so its shared memory is the block's.
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(shared(ring_.slots[slot])),
        "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(loaded)
        : "memory");
  }

  __device__ void wait_loaded(unsigned slot, unsigned parity) const {
    unsigned turned = 0;
    while (!turned) {
      asm volatile(
          "{\n"
          ".reg .pred turned;\n"
          "mbarrier.try_wait.parity.shared::cta.b64 turned, [%1], %2;\n"
          "selp.u32 %0, 1, 0, turned;\n"
          "}"
          : "=r"(turned)
          : "r"(shared(&ring_.loaded[slot])), "r"(parity)
          : "memory");
    }
  }

  // A load and the store of its slot need no fence: both are of the accelerator's proxy.
  __device__ void store(char* to, unsigned slot, unsigned bytes) const {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(
                     __cvta_generic_to_global(to)),
                 "r"(shared(ring_.slots[slot])), "r"(bytes)
                 : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
  }

  template <unsigned kStores>
  __device__ void wait_read() const {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kStores) : "memory");
  }

  // Waits for whole stores, not for their reads alone. A fence between the proxies is implied where
  // completion is seen ("Async proxy" in the PTX ISA), so a release by this thread covers them.
  __device__ void wait_stored() const { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

 private:
  struct Ring {
    alignas(128) char slots[kBulkSlots][kBulkChunk];
    Word loaded[kBulkSlots];  // barriers
  };

  __device__ static Ring& ring_of_block() {
    __shared__ Ring ring;
    return ring;
  }

  __device__ static unsigned shared(const void* address) {
    return unsigned(__cvta_generic_to_shared(address));
  }

  Ring& ring_;
};

}  // namespace distca
