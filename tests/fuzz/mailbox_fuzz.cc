// Fuzzes the mailbox: a rank sends and receives messages while its peer sends envelopes, payloads and arbitrary bytes, over both
// of its links. Each send and recv must end with success or with an Error.
#include "transport/mailbox.h"

#include <memory>
#include <vector>

#include "peer.h"

using namespace mscomm;

namespace {

constexpr uint32_t epoch = 7;
constexpr size_t most_bytes = 64 << 10;  // of one message; messages of more than 16 KiB are announced
constexpr size_t most_transfers = 32;
constexpr int64_t tags[] = {0, 1, last_tag + 1, any_tag};
constexpr size_t sizes[] = {0, 1, 3, 40, eager_bytes, most_bytes};

Dtype some_dtype(fuzz::Input& input) { return input.up_to(3) ? Dtype::uint8 : Dtype::float64; }

void act(fuzz::Input& input, Mailbox& box, fuzz::Peer& sender, fuzz::Peer& receiver) {
  std::vector<char> memory(most_bytes);  // shared by all transfers: nobody looks at its content
  std::vector<std::shared_ptr<Transfer>> transfers;
  uint64_t last_id = 0;
  fuzz::ShortWatch watch;
  const Wait wait{watch, Deadline(60)};
  const auto finish = [&](const std::shared_ptr<Transfer>& transfer) {
    try {
      box.wait(transfer, wait);
    } catch (const Error&) {
    }
  };
  const auto envelope = [&](Envelope::Kind kind) {
    const Dtype dtype = some_dtype(input);
    return Envelope{.kind = kind,
                    .dtype = dtype,
                    .epoch = epoch,
                    .source = 1,
                    .tag = tags[input.up_to(2)],
                    .count = sizes[input.up_to(5)] / size_of(dtype)};
  };
  while (!input.empty()) switch (input.up_to(6)) {
      case 0: {  // a message, with its payload if that follows the header at once
        Envelope header = envelope(input.up_to(1) ? Envelope::Kind::whole : Envelope::Kind::announce);
        header.id = ++last_id;
        sender.say_header(input.changed(header));
        if (header.kind == Envelope::Kind::whole) sender.say(memory.data(), header.count * size_of(header.dtype));
        break;
      }
      case 1: {  // the data of an announced message
        Envelope header = envelope(Envelope::Kind::data);
        header.id = input.up_to(8);
        sender.say_header(input.changed(header));
        sender.say(memory.data(), header.count * size_of(header.dtype));
        break;
      }
      case 2: {  // permission to send the data of a message, or credit
        Envelope header{.kind = input.up_to(1) ? Envelope::Kind::clear : Envelope::Kind::credit, .epoch = epoch, .source = 1};
        (header.kind == Envelope::Kind::clear ? header.id : header.count) = input.up_to(64);
        receiver.say_header(input.changed(header));
        break;
      }
      case 3:
        (input.up_to(1) ? sender : receiver).say(input.bytes(input.byte()));
        break;
      case 4: {
        if (transfers.size() == most_transfers) break;
        const bool sends = input.up_to(1);
        const int peer = input.up_to(2) ? 1 : sends ? 0 : any_source;
        const Dtype dtype = some_dtype(input);
        const size_t bytes = sizes[input.up_to(5)] / size_of(dtype) * size_of(dtype);
        transfers.push_back(box.start({sends, peer, tags[input.up_to(sends ? 2 : 3)], dtype, memory.data(), bytes}));
        break;
      }
      case 5:
        if (!transfers.empty()) finish(transfers[static_cast<size_t>(input.byte()) % transfers.size()]);
        break;
      case 6:
        receiver.listen();
        break;
    }
  for (const auto& transfer : transfers) finish(transfer);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz::Input input(data, size);
  fuzz::Peer sender, receiver;
  Mailbox box({0, 1}, 0, epoch);
  box.add_link(false, 1, sender.link());
  box.add_link(true, 1, receiver.link());
  act(input, box, sender, receiver);
  box.close(0);
  return 0;
}
