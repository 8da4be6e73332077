// A model of what a call over the mesh costs. Of the algorithms with the same carrier, a group runs the one with the least cost.
// docs/design/0005-hosts.md explains the model.
#pragma once

#include <cstddef>

namespace mscomm {

// How often each kind of work happens in a call, one after the other, until its last rank has its result. Where several ranks
// work at the same time, this is the work of the rank that has the most of it.
struct Cost {
  double latencies = 0;  // messages that follow one another: each is sent only after the one before it has arrived
  double messages = 0;   // messages that ranks send one after the other, and about as many that they receive
  double bytes = 0;      // the size of these messages
  double crowded = 0;    // those of the bytes that arrive from several ranks at once
  double copied = 0;     // bytes that are copied or added, beside the kernel's copies
};

// The time of each kind of work on a job's network. All ranks use the prices of rank 0, so that they make the same choice. The
// default prices are estimates for 10 Gbit/s Ethernet; `mscomm bench tune` measures them.
struct Prices {
  double latency_us = 30, message_us = 5, byte_ns = 0.8, crowded_byte_ns = 0.03, copied_byte_ns = 0.1;

  bool valid() const;
  // Returns the same on all ranks, because the core is compiled with -ffp-contract=off.
  double us(const Cost& cost) const {
    return cost.latencies * latency_us + cost.messages * message_us +
           (cost.bytes * byte_ns + cost.crowded * crowded_byte_ns + cost.copied * copied_byte_ns) * 1e-3;
  }
};

}  // namespace mscomm
