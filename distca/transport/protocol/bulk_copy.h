// A copy through a ring of slots, by an asynchronous engine: on GPUs from Hopper on, the tensor
// memory accelerator (`bulk_copy.cuh`); tests run the same code with a model of it.
//
// An engine has
//   begin()                     orders what this thread has seen before the engine's next access
//   load(slot, from, bytes)     starts to fill a slot
//   wait_loaded(slot, parity)   waits for a slot's first, third, ... fill (parity 0), or its
//                               second, fourth, ... (parity 1)
//   store(to, slot, bytes)      starts to write a slot to the target
//   wait_read<n>()              waits until all stores but the last n have read their slots
//   wait_stored()               waits until all stores are complete and visible to this thread
#pragma once

#include "words.h"

namespace distca {

// The engine copies multiples of this number of bytes, at addresses that are multiples of it.
constexpr Word kBulkUnit = 16;

// Bytes of a slot, and slots: 40 KiB of the 48 that a kernel may have as static shared memory.
constexpr Word kBulkChunk = 8192;
constexpr unsigned kBulkSlots = 5;

// Loads under way at a time; the other slots are being stored.
constexpr unsigned kLoadsAhead = 4;

// Least bytes of a bulk copy: with fewer chunks, loads and stores would not overlap.
constexpr Word kBulkLeast = 2 * kBulkChunk;

// The bytes of a copy that the engine takes; none: begin == end.
struct BulkPart {
  Word begin, end;
};

DISTCA_FUNCTION BulkPart bulk_part(const char* to, const char* from, Word bytes) {
  const bool aligned = ((Word(to) ^ Word(from)) & (kBulkUnit - 1)) == 0;
  if (!aligned || bytes < kBulkLeast) return {0, 0};
  const Word begin = -Word(to) & (kBulkUnit - 1);
  return {begin, begin + (bytes - begin) / kBulkUnit * kBulkUnit};
}

// Used by one thread, always the same.
template <class Engine>
class BulkCopy {
 public:
  DISTCA_FUNCTION explicit BulkCopy(Engine engine) : engine_(engine) {}

  // The copy is complete, and visible to this thread, on return.
  DISTCA_FUNCTION void copy(char* to, const char* from, Word bytes) {
    const Word chunks = (bytes + kBulkChunk - 1) / kBulkChunk;
    engine_.begin();
    for (Word chunk = 0; chunk < chunks && chunk < kLoadsAhead; ++chunk) load(from, bytes, chunk);
    for (Word chunk = 0; chunk < chunks; ++chunk) {
      const unsigned fill = fills_ + unsigned(chunk);
      engine_.wait_loaded(fill % kBulkSlots, fill / kBulkSlots & 1);
      engine_.store(to + chunk * kBulkChunk, fill % kBulkSlots, size(bytes, chunk));
      if (chunk + kLoadsAhead < chunks) {
        // That chunk's slot was last read by the store before the last `kBulkSlots - kLoadsAhead`.
        engine_.template wait_read<kBulkSlots - kLoadsAhead>();
        load(from, bytes, chunk + kLoadsAhead);
      }
    }
    engine_.wait_stored();
    // The ring runs on from copy to copy: a slot's fills have the parities 0, 1, 0, ... throughout.
    fills_ += unsigned(chunks);
  }

 private:
  DISTCA_FUNCTION static unsigned size(Word bytes, Word chunk) {
    const Word left = bytes - chunk * kBulkChunk;
    return unsigned(left < kBulkChunk ? left : kBulkChunk);
  }

  DISTCA_FUNCTION void load(const char* from, Word bytes, Word chunk) {
    const unsigned slot = (fills_ + unsigned(chunk)) % kBulkSlots;
    engine_.load(slot, from + chunk * kBulkChunk, size(bytes, chunk));
  }

  Engine engine_;
  unsigned fills_ = 0;  // fills of all slots before this copy; a kernel never reaches 2^32
};

}  // namespace distca
