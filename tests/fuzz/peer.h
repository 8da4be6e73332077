// What the fuzz targets of the core share: a peer whose bytes libFuzzer makes, and waits that end at once.
#pragma once

#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <utility>

#include "base/descriptor.h"
#include "base/error.h"
#include "net/stream.h"
#include "net/wait.h"

namespace mscomm::fuzz {

// Takes values from libFuzzer's input. At the end of the input, it returns zeros.
class Input {
 public:
  Input(const uint8_t* data, size_t bytes) : left_(data, bytes) {}
  bool empty() const { return left_.empty(); }
  uint8_t byte() {
    if (left_.empty()) return 0;
    const uint8_t value = left_[0];
    left_ = left_.subspan(1);
    return value;
  }
  // Returns a number from 0 to `most`, which is at most 255.
  int up_to(int most) { return byte() % (most + 1); }
  std::span<const uint8_t> bytes(size_t most) {
    const auto taken = left_.first(std::min(most, left_.size()));
    left_ = left_.subspan(taken.size());
    return taken;
  }
  // Replaces up to three bytes of a header.
  template <typename T>
  T changed(T header) {
    for (int changes = up_to(3); changes > 0; changes--) {
      const size_t at = byte() % sizeof header;
      reinterpret_cast<uint8_t*>(&header)[at] = byte();
    }
    return header;
  }

 private:
  std::span<const uint8_t> left_;
};

// The peer's end of a link.
class Peer {
 public:
  Peer() : Peer(unix_pair()) {}
  // Returns this rank's end. Call this only once.
  Stream link() { return {ours_.release(), "rank 1"}; }
  // Sends the bytes, or drops them if the socket is full.
  void say(const void* bytes, size_t number) { (void)!::send(end_.get(), bytes, number, MSG_NOSIGNAL | MSG_DONTWAIT); }
  void say(std::span<const uint8_t> bytes) { say(bytes.data(), bytes.size()); }
  template <typename T>
  void say_header(const T& header) {
    say(&header, sizeof header);
  }
  // Reads and drops what was sent to the peer, so that this rank can send more.
  void listen() {
    char scrap[64 << 10];
    while (recv(end_.get(), scrap, sizeof scrap, MSG_DONTWAIT) > 0) {
    }
  }
  void close_for_writing() { shutdown(end_.get(), SHUT_WR); }

 private:
  static std::array<int, 2> unix_pair() {
    std::array<int, 2> ends{};
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()) < 0) throw system_error("socketpair", errno);
    return ends;
  }
  explicit Peer(std::array<int, 2> ends) : ours_(ends[0]), end_(ends[1]) {}

  Descriptor ours_, end_;
};

// Lets the peer speak whenever this rank has nothing to do, and ends the wait when the input has ended.
class TalkingWatch final : public Watch {
 public:
  TalkingWatch(Input& input, std::function<void()> speak) : input_(input), speak_(std::move(speak)) {}
  void look(const Deadline&, const Missing& missing) override {
    if (input_.empty()) throw Error("CollectiveTimeout", "the peer sends nothing more", {}, missing());
    speak_();
  }
  bool broken() const override { return false; }

 private:
  Input& input_;
  std::function<void()> speak_;
};

}  // namespace mscomm::fuzz
