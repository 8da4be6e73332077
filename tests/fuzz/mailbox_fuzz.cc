// Fuzzes the mailbox: a rank sends and receives messages while its peer sends envelopes, payloads and arbitrary bytes, over both
// of its links. Each send and recv must end with success or with an Error.
#include "transport/mailbox.h"

#include <algorithm>
#include <memory>
#include <vector>

#include "peer.h"

using namespace mscomm;

namespace {

constexpr uint32_t epoch = 7;
constexpr size_t most_bytes = 64 << 10;  // of one message; a message of more than 16 KiB is announced
constexpr size_t most_transfers = 32;
constexpr int64_t tags[] = {0, last_tag + 1, any_tag};
constexpr size_t sizes[] = {0, 8, eager_bytes, most_bytes};

class Game {
 public:
  explicit Game(fuzz::Input& input) : input_(input), box_({0, 1}, 0, epoch, true), watch_(input, [this] { speak(); }) {
    box_.add_link(false, 1, sender_.link());
    box_.add_link(true, 1, receiver_.link());
  }

  void play() {
    while (!input_.empty()) switch (input_.up_to(2)) {
        case 0:
          start();
          break;
        case 1:
          if (!transfers_.empty()) wait(transfers_[input_.byte() % transfers_.size()]);
          break;
        case 2:
          speak();
          break;
      }
    for (const auto& transfer : transfers_) wait(transfer);
    box_.close(0);
  }

 private:
  Dtype some_dtype() { return input_.up_to(3) ? Dtype::uint8 : Dtype::float64; }

  void start() {
    if (transfers_.size() == most_transfers) return;
    const bool sends = input_.up_to(1);
    const int peer = input_.up_to(3) ? 1 : sends ? 0 : any_source;
    const Dtype dtype = some_dtype();
    const int64_t tag = tags[input_.up_to(sends ? 1 : 2)];
    arrays_.emplace_back(sizes[input_.up_to(3)]);
    transfers_.push_back(box_.start({sends, peer, tag, dtype, arrays_.back().data(), arrays_.back().size()}));
  }

  void wait(const std::shared_ptr<Transfer>& transfer) {
    try {
      box_.wait(transfer, {watch_, Deadline(60)});
    } catch (const Error&) {
    }
  }

  // The peer sends something over one of the two links, or reads. Most of what it sends is valid.
  void speak() {
    switch (input_.up_to(5)) {
      case 0: {
        Envelope header{.epoch = epoch, .source = 1, .id = ++last_id_};
        header.kind = input_.up_to(1) ? Envelope::Kind::whole : Envelope::Kind::announce;
        header.dtype = some_dtype();
        header.tag = tags[input_.up_to(1)];
        header.count = sizes[input_.up_to(3)] / size_of(header.dtype);
        if (header.kind == Envelope::Kind::announce) announced_.push_back(header);
        say(header);
        break;
      }
      case 1:
        if (!announced_.empty()) {
          Envelope header = announced_[input_.byte() % announced_.size()];
          header.kind = Envelope::Kind::data;
          say(header);
        }
        break;
      case 2: {
        Envelope header{.kind = input_.up_to(1) ? Envelope::Kind::clear : Envelope::Kind::credit, .epoch = epoch, .source = 1};
        (header.kind == Envelope::Kind::clear ? header.id : header.count) = input_.up_to(64);
        receiver_.say_header(input_.changed(header));
        break;
      }
      case 3:
        (input_.up_to(1) ? sender_ : receiver_).say(input_.bytes(input_.byte()));
        break;
      case 4:
        receiver_.listen(), sender_.listen();
        break;
      case 5:
        (input_.up_to(1) ? sender_ : receiver_).close_for_writing();
        break;
    }
  }

  // Sends a header, and the payload that follows it.
  void say(const Envelope& header) {
    const Envelope sent = input_.changed(header);
    sender_.say_header(sent);
    if (sent.kind == Envelope::Kind::announce) return;
    const std::vector<char> payload(std::min(header.count * size_of(header.dtype), input_.up_to(7) ? most_bytes : 1));
    sender_.say(payload.data(), payload.size());
  }

  fuzz::Input& input_;
  fuzz::Peer sender_, receiver_;  // the peer's ends of the link to this rank and of the link from this rank
  uint64_t last_id_ = 0;
  std::vector<Envelope> announced_;
  // Each transfer has an array of its own and of exactly its size, so that AddressSanitizer finds every access outside.
  std::vector<std::vector<char>> arrays_;
  std::vector<std::shared_ptr<Transfer>> transfers_;
  Mailbox box_;
  fuzz::TalkingWatch watch_;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz::Input input(data, size);
  Game(input).play();
  return 0;
}
