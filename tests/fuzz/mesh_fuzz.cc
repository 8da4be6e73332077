// Fuzzes the mesh: a rank makes three calls while its peer sends headers, data and arbitrary bytes. Each call must end with its
// data, with an Error, or with Differs.
#include "transport/mesh.h"

#include <vector>

#include "peer.h"

using namespace mscomm;

namespace {

constexpr uint64_t first_call = 5;
constexpr int calls = 3;
constexpr uint32_t epoch = 1;
constexpr size_t piece_bytes = 24;

Signature call(uint64_t number) {
  Signature signature;
  signature.number = number;
  signature.what = Collective::all_gather;
  signature.function = Function::all_gather;
  signature.dims = 1;
  signature.count = signature.shape[0] = piece_bytes;
  return signature;
}

// Sends what the input says. Most of it is valid, so that the fuzzer reaches what follows the first header.
void speak(fuzz::Peer& peer, fuzz::Input& input) {
  const std::vector<uint8_t> data(piece_bytes);
  while (!input.empty()) switch (input.up_to(3)) {
      case 0: {
        const uint64_t number = first_call - 2 + input.up_to(calls + 2);
        peer.say_header(input.changed(
            Header{.payload = static_cast<uint8_t>(input.up_to(1)), .epoch = epoch, .source = 1, .signature = call(number)}));
        break;
      }
      case 1:
        peer.say(data);
        break;
      case 2:
        peer.say(input.bytes(input.byte()));
        break;
      case 3:
        peer.say(std::span(data).first(input.up_to(piece_bytes)));
        break;
    }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz::Input input(data, size);
  fuzz::Peer peer;
  std::vector<std::optional<Stream>> links(2);
  links[1].emplace(peer.link());
  const auto recorded = [](uint64_t number) { return number == first_call - 1 ? std::optional(call(number)) : std::nullopt; };
  Mesh mesh({0, 1}, 0, epoch, false, std::move(links), recorded);
  const bool sends = input.up_to(1);
  for (int early = input.up_to(7); early > 0; early--) speak(peer, input);
  fuzz::TalkingWatch watch(input, [&] { speak(peer, input); });
  const Wait wait{watch, Deadline(60)};
  std::vector<char> out(piece_bytes), in(piece_bytes);
  try {
    for (uint64_t number = first_call; number < first_call + calls; number++) {
      mesh.begin(call(number));
      const Piece to{1, out.data(), out.size()}, from{1, in.data(), in.size()};
      if (sends) mesh.exchange({&to, 1}, {&from, 1}, wait);
      else mesh.receive({&from, 1}, wait);
    }
    mesh.last_look();
  } catch (const Error&) {
  } catch (const Differs& differs) {
    // The communicator writes these into the text of a Mismatch.
    for (const auto& [rank, signature] : differs.calls) (void)(signature.text().size() + signature.fingerprint());
  }
  mesh.close(0);
  return 0;
}
