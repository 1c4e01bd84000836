// The layout of a rank's control memory, and the outcomes of waits.
#pragma once

#ifdef __CUDACC__
#define DISTCA_FUNCTION __device__ inline
#define DISTCA_EITHER __host__ __device__ constexpr
#else
#define DISTCA_FUNCTION inline
#define DISTCA_EITHER constexpr
#endif

namespace distca {

// The type of flags, epochs, offsets and sizes: 64 bits on every compiler, without a header.
using Word = unsigned long long;
static_assert(sizeof(Word) == 8, "flags are shared between compilers");

// A cache line. Each flag has its own, so that ranks that set different flags don't contend.
constexpr Word kLine = 64;

// The first lines of a rank's control memory; after them come the channels' flags.
constexpr Word kAbortWord = 0;         // 0, or why a rank ended the exchange: see `abort_word`
constexpr Word kLeftWord = kLine;      // 1 once this rank has closed its transport
constexpr Word kBell = 2 * kLine;      // rung when something in this memory has changed (CPU only)
constexpr Word kHeadBytes = 4 * kLine;

// The flags of one channel: offsets in the control memory of any rank.
struct Flags {
  Word base;
  int ranks;

  DISTCA_EITHER Flags(int channel, int ranks)
      : base(kHeadBytes + 2 * kLine * Word(ranks) * Word(channel)), ranks(ranks) {}
  // The last epoch whose message from `source` is complete here.
  DISTCA_EITHER Word ready(int source) const { return base + kLine * Word(source); }
  // The last epoch that `destination` has released.
  DISTCA_EITHER Word credit(int destination) const {
    return base + kLine * (Word(ranks) + Word(destination));
  }
};

enum class Outcome : int {
  done = 0,
  not_yet = 1,    // the time slice is over
  timed_out = 2,  // the peer is there but does nothing
  died = 3,       // the peer's process has ended
  left = 4,       // the peer has closed its transport
  aborted = 5,    // another rank has ended the exchange: its abort word says why
};

// Why a rank ended the exchange (an Outcome), which rank it was, and which one it blames.
DISTCA_EITHER Word abort_word(Outcome reason, int reporter, int culprit) {
  return Word(reason) << 48 | Word(reporter) << 24 | Word(culprit);
}

// The first failure of a rank; Python reads it as six words.
struct Failure {
  Word outcome;
  Word peer;     // the rank that this one waited for
  Word sending;  // 1: it waited for room at the peer; 0: for the peer's message
  Word channel;
  Word epoch;
  Word abort;  // this rank's abort word
};

}  // namespace distca
