// The header that opens a call on a mesh link. See "Frames" in docs/design/0001-call.md.
#pragma once

#include <cstdint>

#include "base/call.h"

namespace mscomm {

inline constexpr uint32_t frame_magic = 0x4d43534d;  // "MSCM" in memory
inline constexpr uint16_t wire_version = 3;

struct Header {
  uint32_t magic = frame_magic;
  uint16_t wire = wire_version;
  uint8_t payload = 0;  // 1 if the call's data follows; 0 if the header only says which call the sender is in
  uint8_t zero = 0;
  uint32_t epoch = 0;
  uint32_t source = 0;
  Signature signature;
  // How many elements the sender of this header sends to the receiver, and how many it expects from the receiver. Both are 0
  // unless the call has recv_counts.
  uint64_t sends = 0, expects = 0;
};
static_assert(sizeof(Header) == 168);
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the wire is little endian; this machine needs a conversion here");

}  // namespace mscomm
