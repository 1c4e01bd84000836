// The protocol of a ragged all-to-all by one-sided puts: one source for CPUs (`host.h`, where ranks
// are processes that share memory) and for GPUs (`device.cuh`).
//
// A channel has a receive arena and a page of flags at the same offsets of every rank's memory.
// Its exchanges are numbered by an epoch that starts at 1 and is never reset. In epoch e a rank
//
//   1. waits until the destination has released epoch e - 1:   credit[destination] >= e - 1
//   2. puts its message where the plan says that it begins in the destination's arena
//   3. fences: the message is complete there before anything that follows
//   4. sets ready[this rank] = e at the destination, also when the message is empty
//
// and as a receiver waits for ready[source] >= e, reads, and sets credit[this rank] = e at the
// source. Flags are set, never added to, so none can be lost or counted twice; no sizes travel and
// there is no barrier.
//
// Among members only an epoch counts the messages of two ranks, from 2, and empty ones are left out.
// A destination cannot tell then by what it has released that its arena is free for a source whose
// last message was long ago, so it sets the credit when it starts an exchange, not when it ends one.
//
// A fabric, by which a rank reaches the others, has `rank()`, `ranks()` and
//   wait_for(peer, flag, value)     until a flag in this rank's memory is at least `value`; acquires
//   put(peer, to, from, bytes)      copies into the peer's arena
//   fence(peer)                     this thread's (block's) puts are complete before what follows
//   set(peer, flag, value)          stores a flag in the peer's memory; releases
//   last_part(peer, parts)          counts a part that is complete; true for the last of a message
//   put_and_set(peer, to, from, bytes, flag, value)
//                                   steps 2 to 4 in one, for `send_whole`: the flag is stored after
//                                   the message is complete there
//   leads(), shared(), all_put()    for thread blocks: whether this thread signals; the outcome
//                                   that the leader found; a barrier once all threads have put
#pragma once

#include "words.h"

namespace distca {

// Alignment, in bytes, of the part of a message that one thread (block) copies.
constexpr Word kPartAlignment = 128;

struct Message {
  const char* from;  // in the sender's staging
  Word bytes;
  Word to;  // offset in the destination's arena
};

// Step 1. Where the host starts puts, this rank waits for room at all peers, puts to all, fences,
// and then tells all.
template <class Fabric>
DISTCA_FUNCTION Outcome wait_for_room(Fabric& fabric, const Flags& flags, Word epoch, int peer) {
  return fabric.wait_for(peer, flags.credit(peer), epoch - 1);
}

// The same for all threads of a block.
template <class Fabric>
DISTCA_FUNCTION Outcome find_room(Fabric& fabric, const Flags& flags, Word epoch, int peer) {
  Outcome outcome = Outcome::done;
  if (fabric.leads()) outcome = wait_for_room(fabric, flags, epoch, peer);
  return fabric.shared(outcome);
}

// Step 4.
template <class Fabric>
DISTCA_FUNCTION void set_ready(Fabric& fabric, const Flags& flags, Word epoch, int peer) {
  fabric.set(peer, flags.ready(fabric.rank()), epoch);
}

// Sends one of `parts` equal parts of this rank's message to a peer.
template <class Fabric>
DISTCA_FUNCTION Outcome send_part(Fabric& fabric, const Flags& flags, Word epoch, int peer,
                                  const Message& message, int part, int parts) {
  const Outcome outcome = find_room(fabric, flags, epoch, peer);
  if (outcome != Outcome::done) return outcome;
  const Word even = (message.bytes + parts - 1) / parts;
  const Word piece = (even + kPartAlignment - 1) / kPartAlignment * kPartAlignment;
  const Word begin = piece * part < message.bytes ? piece * part : message.bytes;
  const Word end = message.bytes - begin < piece ? message.bytes : begin + piece;
  fabric.put(peer, message.to + begin, message.from + begin, end - begin);
  fabric.all_put();
  if (fabric.leads()) {
    fabric.fence(peer);
    if (fabric.last_part(peer, parts)) set_ready(fabric, flags, epoch, peer);
  }
  return Outcome::done;
}

// Sends this rank's whole message to a peer, by a fabric that can put and set a flag in one.
template <class Fabric>
DISTCA_FUNCTION Outcome send_whole(Fabric& fabric, const Flags& flags, Word epoch, int peer,
                                   const Message& message) {
  const Outcome outcome = find_room(fabric, flags, epoch, peer);
  if (outcome != Outcome::done) return outcome;
  fabric.put_and_set(peer, message.to, message.from, message.bytes, flags.ready(fabric.rank()),
                     epoch);
  return Outcome::done;
}

// Waits for a source's message.
template <class Fabric>
DISTCA_FUNCTION Outcome receive(Fabric& fabric, const Flags& flags, Word epoch, int source) {
  return fabric.wait_for(source, flags.ready(source), epoch);
}

// Tells a source that its message was read, so that it may send the next.
template <class Fabric>
DISTCA_FUNCTION void release(Fabric& fabric, const Flags& flags, Word epoch, int source) {
  fabric.set(source, flags.credit(fabric.rank()), epoch);
}

}  // namespace distca
