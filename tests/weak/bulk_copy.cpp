// Bulk copies by a model of the tensor memory accelerator, which does everything as late as it may,
// or at a random time before: a wait that is missing shows as wrong bytes or as a breach. What would
// be a breach is not done.

#include <cstring>
#include <optional>
#include <random>
#include <vector>

#include "bulk_copy.h"

namespace distca {

class Model {
 public:
  struct Memory {
    std::mt19937 random;
    double eager = 0;  // how likely it is that something is done before it must
    const char* breach = nullptr;
    const char* from = nullptr;  // the copy that is under way
    char* to = nullptr;
    Word bytes = 0;

    struct Slot {
      std::vector<char> bytes = std::vector<char>(kBulkChunk, char(0xEE));
      std::optional<std::pair<const char*, unsigned>> load;  // started
      unsigned fills = 0;                                    // done
    };
    struct Store {
      char* to;
      unsigned slot;
      std::vector<char> bytes;
      bool read = false;
    };
    std::vector<Slot> slots = std::vector<Slot>(kBulkSlots);
    std::vector<Store> stores;  // not complete yet, oldest first
  };

  explicit Model(Memory& memory) : memory_(&memory) {}

  void begin() {}

  void load(unsigned slot, const char* from, unsigned bytes) {
    bool may = check(bytes > 0 && bytes <= kBulkChunk, "a load does not fit its slot") &&
               check((Word(from) | bytes) % kBulkUnit == 0, "a load is not aligned") &&
               check(inside(from, memory_->from, bytes), "a load is not of the source") &&
               check(!memory_->slots[slot].load, "a slot is loaded twice");
    for (const auto& store : memory_->stores) {
      may &= check(store.slot != slot || store.read, "a slot is loaded before it was read");
    }
    if (!may) return;
    memory_->slots[slot].load = {from, bytes};
    sometimes();
  }

  void wait_loaded(unsigned slot, unsigned parity) {
    sometimes();
    auto& its = memory_->slots[slot];
    // A barrier waits while the fill that is under way has this parity.
    if (its.fills % 2 != parity) return;
    if (check(its.load.has_value(), "a load that was not started is waited for")) fill(its);
  }

  void store(char* to, unsigned slot, unsigned bytes) {
    const bool may =
        check(bytes > 0 && bytes <= kBulkChunk, "a store is larger than its slot") &&
        check((Word(to) | bytes) % kBulkUnit == 0, "a store is not aligned") &&
        check(inside(to, memory_->to, bytes), "a store is not to the target") &&
        check(!memory_->slots[slot].load, "a slot is stored while it is loaded");
    if (!may) return;
    memory_->stores.push_back({to, slot, std::vector<char>(bytes)});
    sometimes();
  }

  template <unsigned kStores>
  void wait_read() {
    sometimes();
    const std::size_t stores = memory_->stores.size();
    for (std::size_t i = 0; i + kStores < stores; ++i) read(memory_->stores[i]);
  }

  void wait_stored() {
    for (auto& store : memory_->stores) write(store);
    memory_->stores.clear();
  }

 private:
  bool check(bool holds, const char* breach) {
    if (!holds && memory_->breach == nullptr) memory_->breach = breach;
    return holds;
  }

  bool inside(const char* piece, const char* whole, unsigned bytes) {
    return piece >= whole && piece + bytes <= whole + memory_->bytes;
  }

  void fill(Memory::Slot& slot) {
    if (!slot.load) return;
    std::memcpy(slot.bytes.data(), slot.load->first, slot.load->second);
    slot.load.reset();
    ++slot.fills;
  }

  void read(Memory::Store& store) {
    if (store.read) return;
    std::memcpy(store.bytes.data(), memory_->slots[store.slot].bytes.data(), store.bytes.size());
    store.read = true;
  }

  void write(Memory::Store& store) {
    read(store);
    std::memcpy(store.to, store.bytes.data(), store.bytes.size());
  }

  void sometimes() {
    std::uniform_real_distribution<> chance;
    for (auto& slot : memory_->slots) {
      if (chance(memory_->random) < memory_->eager) fill(slot);
    }
    for (auto& store : memory_->stores) {
      if (chance(memory_->random) < memory_->eager) read(store);
      if (chance(memory_->random) < memory_->eager) write(store);
    }
  }

  Memory* memory_;
};

}  // namespace distca

extern "C" {

using distca::Word;

void bulk_constants(Word* into) {
  into[0] = distca::kBulkChunk;
  into[1] = distca::kBulkSlots * distca::kBulkChunk;
  into[2] = distca::kBulkLeast;
}

// Copies one after the other, as one block of a kernel does; `in_bulk` gets how many bytes of each
// the model moved. Returns what was breached, or null.
const char* bulk_copies(int copies, char* const* to, const char* const* from, const Word* bytes,
                        Word* in_bulk, unsigned seed, double eager) {
  distca::Model::Memory memory;
  memory.random.seed(seed);
  memory.eager = eager;
  distca::BulkCopy<distca::Model> copy{distca::Model(memory)};
  for (int i = 0; i < copies; ++i) {
    const auto part = distca::bulk_part(to[i], from[i], bytes[i]);
    in_bulk[i] = part.end - part.begin;
    if (in_bulk[i] == 0) continue;
    memory.from = from[i];
    memory.to = to[i];
    memory.bytes = bytes[i];
    std::memcpy(to[i], from[i], part.begin);
    std::memcpy(to[i] + part.end, from[i] + part.end, bytes[i] - part.end);
    copy.copy(to[i] + part.begin, from[i] + part.begin, in_bulk[i]);
    if (!memory.stores.empty() && memory.breach == nullptr) {
      memory.breach = "a copy ends before its stores";
    }
    memory.stores.clear();
  }
  return memory.breach;
}

}  // extern "C"
