#include "base/call.h"

#include <algorithm>
#include <cstdio>

#include "base/levels.h"
#include "base/reduce.h"

namespace mscomm {

namespace {

struct Elements {
  uint64_t x = 0, out = 0;
};

// A number of elements or bytes, or nullopt if it does not fit into 64 bits. Anything computed from nullopt is also nullopt.
using Size = std::optional<uint64_t>;

Size product(Size a, uint64_t b) {
  uint64_t result;
  return a && !__builtin_mul_overflow(*a, b, &result) ? Size(result) : std::nullopt;
}

Size sum(const std::vector<uint64_t>& counts, size_t first, size_t number, size_t stride) {
  uint64_t total = 0;
  for (size_t i = 0; i < number; i++)
    if (__builtin_add_overflow(total, counts[first + i * stride], &total)) return std::nullopt;
  return total;
}

// Stores to aligned addresses. On a Zen 3, memcpy in pieces of 1.5 KiB takes three times as long for slow addresses.
[[gnu::always_inline]] inline void copy_loop(char* to, const char* from, size_t bytes) {
  constexpr size_t width = 32, at_once = 4;
  using Vector [[gnu::vector_size(width), gnu::aligned(1), gnu::may_alias]] = char;
  const size_t head = width - reinterpret_cast<uintptr_t>(to) % width;
  *reinterpret_cast<Vector*>(to) = *reinterpret_cast<const Vector*>(from);
  to += head, from += head, bytes -= head;
  for (; bytes >= at_once * width; to += at_once * width, from += at_once * width, bytes -= at_once * width) {
    Vector values[at_once];
    for (size_t i = 0; i < at_once; i++) values[i] = reinterpret_cast<const Vector*>(from)[i];
    for (size_t i = 0; i < at_once; i++) reinterpret_cast<Vector*>(to)[i] = values[i];
  }
  std::memcpy(to, from, bytes);
}

// Returns how many elements of x rank `me` reads, and how many elements of out it writes. If the collective has a root, these
// are the numbers for `me` as the root.
Elements elements(const Call& call, size_t me, size_t n) {
  const Collective what = call.signature.what;
  const uint64_t count = call.signature.count;
  const std::vector<uint64_t>& counts = call.counts;
  // The sums cannot overflow, because check() has already checked the sum of all counts.
  const uint64_t own = counts.empty() ? count / (divides(what) ? n : 1) : counts[me];
  const uint64_t whole = counts.empty() ? count * (gathers(what) ? n : 1) : *sum(counts, 0, counts.size(), 1);
  if (what == Collective::barrier) return {};
  if (gathers(what)) return {own, whole};
  if (!call.recv_counts.empty()) return {*sum(counts, 0, n, 1), *sum(call.recv_counts, 0, n, 1)};
  if (what == Collective::all_to_all && !counts.empty()) return {*sum(counts, me * n, n, 1), *sum(counts, me, n, n)};
  if (divides(what) && what != Collective::all_to_all) return {whole, own};
  return {count, count};
}

}  // namespace

void check(const Call& call, int rank, int size) {
  const Signature& signature = call.signature;
  // An error text begins like this: "gather on rank 1 of 4: ".
  const auto refuse = [&](const std::string& why) {
    throw Error("ValueError", std::string(name(signature.function)) + " on rank " + std::to_string(rank) + " of " +
                                  std::to_string(size) + ": " + why);
  };
  if (!signature.valid())
    throw Error("ValueError", "a call of a collective, function, type or operation that this version does not know");
  const Collective what = signature.what;
  const size_t n = size, me = rank;

  // The signature of a head may name the root of the next call, even if the head's own collective has no root. But a head that is
  // a reduction must not name a root: all_reduce_arena, for example, would then deliver the result only to the root.
  const bool may_have_root = rooted(what) || (signature.head && !reduces(what));
  if (signature.root < (rooted(what) ? 0 : -1) || signature.root >= (may_have_root ? size : 0))
    refuse("root " + std::to_string(signature.root) + ", expected " +
           (may_have_root ? "a rank from 0 to " + std::to_string(size - 1) : "-1, as " + std::string(name(what)) + " has none"));
  if (reduces(what) && !supports(signature.dtype, signature.op))
    refuse(std::string(name(signature.op)) + " is not defined on " + std::string(name(signature.dtype)));
  if (scans(what) && signature.op == Op::avg) refuse("avg is not defined: each rank would divide by a different number");

  Size count = what == Collective::barrier ? 0 : 1;
  for (int i = 0; i < signature.dims; i++) count = product(count, signature.shape[i]);
  // The size in bytes of the largest possible array on any rank must fit into 64 bits.
  if (!product(product(count, call.element_bytes()), n)) refuse("the shape has more bytes than this machine can count");
  if (*count != signature.count)
    refuse(std::to_string(signature.count) + " elements, expected " + std::to_string(*count) + ", the product of the shape");
  if (call.counts.empty()) {
    if (!call.recv_counts.empty()) refuse("receive counts, but no send counts");
    if (divides(what) && *count % n)
      refuse(std::to_string(*count) + " elements, expected a multiple of the " + std::to_string(n) + " ranks");
  } else {
    const bool local = !call.recv_counts.empty(), square = what == Collective::all_to_all && !local;
    const size_t expected = gathers(what) || divides(what) ? square ? n * n : n : 0;
    if (call.counts.size() != expected)
      refuse(std::to_string(call.counts.size()) + " counts, expected " +
             (expected ? std::to_string(expected) + (square ? ", from each rank to each" : ", one for each rank") : "none"));
    const Size total = sum(call.counts, 0, expected, 1);
    if (!product(total, call.element_bytes())) refuse("the counts add up to more bytes than this machine can count");
    if (*total != *count && !((square || local) && *count == 0))
      refuse("the counts add up to " + std::to_string(*total) + " elements, expected " + std::to_string(*count) +
             ", the product of the shape");
    if (local) {
      if (what != Collective::all_to_all || call.stream || call.recv_counts.size() != n)
        refuse(std::to_string(call.recv_counts.size()) + " receive counts, expected " +
               (what == Collective::all_to_all && !call.stream ? "one for each rank" : "none"));
      if (!product(sum(call.recv_counts, 0, n, 1), call.element_bytes()))
        refuse("the receive counts add up to more bytes than this machine can count");
      if (call.counts[me] != call.recv_counts[me])
        refuse("the rank sends " + std::to_string(call.counts[me]) + " elements to itself, but expects " +
               std::to_string(call.recv_counts[me]));
    }
  }

  const bool at_root = !rooted(what) || rank == signature.root;
  const bool reads_all = what != Collective::broadcast && what != Collective::scatter;
  const bool writes_all = what != Collective::reduce && what != Collective::gather;
  const Elements whole = elements(call, me, n);
  const auto compare = [&](const char* array, const void* memory, size_t bytes, uint64_t number) {
    if (bytes != number * call.element_bytes())
      refuse(std::string(array) + " has " + std::to_string(bytes) + " bytes, expected " +
             std::to_string(number * call.element_bytes()) + " (" + std::to_string(number) + " of " +
             std::string(name(signature.dtype)) + ")");
    if (bytes && !memory) refuse(std::string(array) + " has " + std::to_string(bytes) + " bytes, but no memory");
  };
  if (at_root || reads_all || call.x_bytes) compare("x", call.x, call.x_bytes, whole.x);
  compare("out", call.out, call.out_bytes, at_root || writes_all ? whole.out : 0);
}

uint64_t Signature::fingerprint() const {
  uint64_t mixed = 0;
  // Each step is a bijection on `mixed` (an xor, a multiplication by an odd number, an xorshift). So if two signatures
  // differ in a single word, no later step makes their values of `mixed` equal again.
  const auto mix = [&mixed](uint64_t word) {
    mixed = (mixed ^ word) * 0x9E3779B97F4A7C15u;
    mixed ^= mixed >> 32;
  };
  mix(number);
  mix(static_cast<uint64_t>(what) | static_cast<uint64_t>(dtype) << 8 | static_cast<uint64_t>(op) << 16 |
      static_cast<uint64_t>(dims) << 24 | static_cast<uint64_t>(static_cast<uint32_t>(root)) << 32);
  mix(static_cast<uint64_t>(function) | static_cast<uint64_t>(head) << 8 | static_cast<uint64_t>(device) << 16);
  mix(count);
  mix(digest);
  for (int i = 0; i < dims; i++) mix(shape[i]);
  return mixed;
}

std::string Signature::text() const {
  if (!valid()) return "a call that this version does not know";
  std::string text = std::string(name(function)) + " #" + std::to_string(number);
  if (what == Collective::barrier) return text;
  text += head ? " (ahead of the data: " : " (";
  text += std::string(name(dtype)) + "[";
  for (int i = 0; i < dims; i++) text += (i ? ", " : "") + std::to_string(shape[i]);
  text += "]";
  if (reduces(what)) text += ", " + std::string(name(op));
  if (root >= 0) text += ", root " + std::to_string(root);
  if (digest) {
    char digits[32];
    std::snprintf(digits, sizeof digits, ", digest %08x", static_cast<unsigned>(digest >> 32 ^ digest));
    text += digits;
  }
  return text + (device ? ", on the device)" : ")");
}

Error mismatch(const std::string& who, const std::vector<std::pair<std::string, std::vector<int>>>& callers) {
  std::string text;
  std::vector<int> others;
  for (size_t i = 0; i < callers.size(); i++) {
    const auto& [call, ranks] = callers[i];
    text += (i ? "; " : "") + std::string(ranks.size() > 1 ? "ranks " : "rank ");
    for (size_t k = 0; k < ranks.size(); k++) text += (k ? ", " : "") + std::to_string(ranks[k]);
    text += " called " + call;
    if (i) others.insert(others.end(), ranks.begin(), ranks.end());
  }
  return {"Mismatch",
          who + " made different calls: " + text +
              ". Every rank must make the same calls in the same order, with the same shapes, types and options",
          others};
}

Error counts_differ(const Signature& call, int source, uint64_t sent, int destination, uint64_t expected) {
  uint64_t row = 1;  // the number of elements in a row; rows are what the user counts
  for (int i = 1; i < call.dims; i++) row *= call.shape[i];
  const auto rows = [row](uint64_t count) {
    const uint64_t number = count / std::max<uint64_t>(1, row);
    return std::to_string(number) + (number == 1 ? " row" : " rows");
  };
  const std::string from = "rank " + std::to_string(source), to = "rank " + std::to_string(destination);
  return {"Mismatch",
          call.text() + ": " + from + " sends " + rows(sent) + " to " + to + ", but " + to + " expects " + rows(expected) +
              " from " + from + ". What a rank passes in send_counts for another rank, that rank must pass in recv_counts",
          {source, destination}};
}

#if defined(__x86_64__)
bool slow_movsb = (__builtin_cpu_init(), __builtin_cpu_is("amdfam19h"));
#else
bool slow_movsb = false;
#endif

void copy_by_vectors(void* to, const void* from, size_t bytes) {
  auto* const begin = static_cast<char*>(to);
  const auto* const source = static_cast<const char*>(from);
  static const bool wide = levels() > 1;
  if (wide) Avx2::run<copy_loop>(begin, source, bytes);
  else Baseline::run<copy_loop>(begin, source, bytes);
}

std::string in_units(uint64_t bytes) {
  static constexpr const char* units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes);
  size_t unit = 0;
  while (value >= 1024 && unit + 1 < std::size(units)) value /= 1024, unit++;
  char text[32];
  std::snprintf(text, sizeof text, value == static_cast<uint64_t>(value) ? "%.0f %s" : "%.1f %s", value, units[unit]);
  return text;
}

}  // namespace mscomm
