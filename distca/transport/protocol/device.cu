// The kernels of the device transport. Python launches them by name on the channel's stream: a grid
// of a few blocks sends; single blocks wait, release, and signal for copy engines.

#include "device.cuh"

using namespace distca;

// Sends this rank's messages, beginning with its successor's. `sizes` is [3, ranks]: bytes, offset in
// the staging, offset in the receiver's arenas. Messages to peers that are not mapped go first, each
// by one block: network cards copy them while each block copies its part of every message to a
// mapped peer. `bulk`: the tensor memory accelerator copies what it can, on GPUs that have one; else
// all threads copy.
extern "C" __global__ void __launch_bounds__(512, 1)
    distca_send(const Rank* me, int channel, Word epoch, const char* staging, const Word* sizes,
                int bulk) {
  SendingFabric fabric(*me, channel, bulk != 0);
  const Flags flags(channel, fabric.ranks());
  const Word* bytes = sizes;
  const Word* from = sizes + fabric.ranks();
  const Word* to = sizes + 2 * fabric.ranks();
#ifdef DISTCA_NVSHMEM
  int unmapped = 0;
  for (int shift = 1; shift < fabric.ranks(); ++shift) {
    const int peer = (fabric.rank() + shift) % fabric.ranks();
    if (fabric.maps(peer) || unmapped++ % int(gridDim.x) != int(blockIdx.x)) continue;
    const Message message{staging + from[peer], bytes[peer], to[peer]};
    const Outcome outcome = send_whole(fabric, flags, epoch, peer, message);
    if (outcome != Outcome::done) {
      if (fabric.leads()) fabric.fail(outcome, peer, true, epoch);
      return;
    }
  }
#endif
  for (int shift = 1; shift < fabric.ranks(); ++shift) {
    const int peer = (fabric.rank() + shift) % fabric.ranks();
    if (!fabric.maps(peer)) continue;
    const Message message{staging + from[peer], bytes[peer], to[peer]};
    const Outcome outcome =
        send_part(fabric, flags, epoch, peer, message, int(blockIdx.x), int(gridDim.x));
    if (outcome != Outcome::done) {
      if (fabric.leads()) fabric.fail(outcome, peer, true, epoch);
      return;
    }
  }
#ifdef DISTCA_NVSHMEM
  if (unmapped > int(blockIdx.x)) fabric.finish_puts();
#endif
}

// Waits for all messages. If one does not come, all of `received` becomes not-a-number, so that it
// is not taken for results before the program finds the failure.
extern "C" __global__ void __launch_bounds__(512, 1)
    distca_wait(const Rank* me, int channel, Word epoch, char* received, Word bytes) {
  DeviceFabric fabric(*me, channel);
  const Flags flags(channel, fabric.ranks());
  int failed = 0;
  for (int source = threadIdx.x; source < fabric.ranks(); source += blockDim.x) {
    if (source == fabric.rank()) continue;
    const Outcome outcome = receive(fabric, flags, epoch, source);
    if (outcome != Outcome::done) {
      fabric.fail(outcome, source, false, epoch);
      failed = 1;
    }
  }
  if (__syncthreads_or(failed)) {
    for (Word i = threadIdx.x; i < bytes; i += blockDim.x) received[i] = char(0xFF);
  }
}

// Tells all sources that their messages were read, so that they may send again.
extern "C" __global__ void __launch_bounds__(512, 1)
    distca_release(const Rank* me, int channel, Word epoch) {
  DeviceFabric fabric(*me, channel);
  const Flags flags(channel, fabric.ranks());
  for (int source = threadIdx.x; source < fabric.ranks(); source += blockDim.x) {
    if (source != fabric.rank()) release(fabric, flags, epoch, source);
  }
}

// The first and the last step alone, around puts that the host starts. On the stream these are
// complete before the last step begins: NVSHMEM's `quiet_on_stream` is between them.
extern "C" __global__ void __launch_bounds__(512, 1)
    distca_wait_for_room(const Rank* me, int channel, Word epoch) {
  DeviceFabric fabric(*me, channel);
  const Flags flags(channel, fabric.ranks());
  for (int peer = threadIdx.x; peer < fabric.ranks(); peer += blockDim.x) {
    if (peer == fabric.rank()) continue;
    const Outcome outcome = wait_for_room(fabric, flags, epoch, peer);
    if (outcome != Outcome::done) fabric.fail(outcome, peer, true, epoch);
  }
}

extern "C" __global__ void __launch_bounds__(512, 1)
    distca_set_ready(const Rank* me, int channel, Word epoch) {
  DeviceFabric fabric(*me, channel);
  const Flags flags(channel, fabric.ranks());
  // After a failure nothing is ready: the copies did not wait for room.
  if (load_acquire(me->control + kAbortWord) != 0) return;
  __threadfence_system();
  for (int peer = threadIdx.x; peer < fabric.ranks(); peer += blockDim.x) {
    if (peer == fabric.rank()) continue;
    set_ready(fabric, flags, epoch, peer);
  }
}

#ifdef DISTCA_NVSHMEM
// Tells whether GPUs start transfers between machines themselves; else a thread of the host does.
// NVSHMEM has no function that tells: its own functions branch on this.
extern "C" __global__ void __launch_bounds__(512, 1) distca_gpu_initiated(int* answer) {
  *answer = nvshmemi_device_state_d.ibgda_is_initialized;
}
#endif
