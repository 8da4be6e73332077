// A mailbox moves a group's point-to-point messages. It has links of its own, so messages do not disturb collectives.
//
// A link carries messages from one rank to another. The receiver sends only two kinds of header back on the link: permission to
// send a message's data, and credit. If a message has at most eager_bytes, and the sender has enough credit, the message is sent
// whole. Any other message is announced first, and its data follows when a recv has been matched to it. So large messages use no
// memory of the mailbox, and small messages use at most eager_window for each source. An announcement reaches the receiver even
// if earlier messages still have no recv. So a program hangs only if it would also hang if every send waited for its recv. A send
// of at most eager_bytes may return before its recv is called, but programs must not rely on that. A message from a rank to
// itself is copied at once, either to a recv that waits for it or to a buffer of the mailbox.
//
// A recv may accept any source or any tag. The rules are those of MPI: a message goes to the first recv that accepts it, in the
// order in which recvs were called. A recv takes the first message that it accepts, in the order in which messages arrived.
// Messages from one source arrive in the order in which that source sent them.
//
// The mailbox touches the caller's array only while it holds mutex_, and only until the transfer of that array has ended. So no
// thread of this process touches the array after wait() has returned or thrown, or after shut_down() has returned.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <limits>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "base/types.h"
#include "net/frame.h"
#include "net/stream.h"
#include "net/wait.h"

namespace mscomm {

// A message of at most eager_bytes may be sent before its recv is called. On each link, at most eager_window bytes of such
// messages (with their headers) may be without a recv at the same time.
inline constexpr size_t eager_bytes = 16u << 10;
inline constexpr size_t eager_window = 1u << 20;
inline constexpr uint32_t envelope_magic = 0x5043534d;  // "MSCP" in memory

inline constexpr int any_source = -1;
inline constexpr int64_t any_tag = std::numeric_limits<int64_t>::min();
// The highest tag that users may give. Higher tags are for the bytes of Python objects (see python/mscomm/objects.py). any_tag
// does not match them.
inline constexpr int64_t last_tag = std::numeric_limits<int32_t>::max();

// The header of a message, or a header that the receiver sends back.
struct Envelope {
  enum class Kind : uint8_t {
    whole,     // the payload follows
    announce,  // the payload follows when the receiver has sent `clear` with this id
    data,      // the payload of an announced message follows
    clear,     // receiver to sender: a recv was matched to the message with this id
    credit,    // receiver to sender: `count` bytes of whole messages were matched to recvs
  };

  uint32_t magic = envelope_magic;
  uint16_t wire = wire_version;
  Kind kind = Kind::whole;
  Dtype dtype = Dtype::uint8;
  uint32_t epoch = 0;
  uint32_t source = 0;  // the rank that sends this header
  int64_t tag = 0;
  uint64_t count = 0;  // in elements; for credit, in bytes
  uint64_t id = 0;     // the number of the message on its link, from 1
};
static_assert(sizeof(Envelope) == 40);

// One send or recv.
class Transfer {
 public:
  Transfer(bool sends, int peer, int64_t tag, Dtype dtype, char* data, size_t bytes)
      : sends(sends), peer(peer), tag(tag), dtype(dtype), bytes(bytes), data_(data), matched_peer_(peer), matched_tag_(tag) {}

  // Whether the transfer has ended, with or without an error.
  bool done() const { return done_.load(); }
  // Call this only when the transfer has ended.
  const std::optional<Error>& error() const { return error_; }
  // The rank of the peer. For a recv from any source, any_source until the recv is matched to a message.
  int matched_peer() const { return matched_peer_.load(); }
  // The tag of the message. Valid when the transfer has ended without an error.
  int64_t matched_tag() const { return matched_tag_; }

  const bool sends;
  const int peer;     // a rank of the group, or any_source
  const int64_t tag;  // the tag of the message, or any_tag
  const Dtype dtype;
  const size_t bytes;

 private:
  friend class Mailbox;
  // The mailbox's mutex protects these:
  char* const data_;
  bool begun_ = false;  // the link may carry a part of this transfer, so dropping the transfer ends the link
  uint64_t id_ = 0;     // for a send that has begun: the number of the message on the link to the peer
  uint64_t turn_ = 0;   // for a recv: its place in the order in which recvs were posted
  std::atomic<int> matched_peer_;
  int64_t matched_tag_;
  bool cleared_ = false;
  std::optional<Error> error_;
  std::atomic<bool> done_{false};
};

class Mailbox {
 public:
  // ranks: the group's ranks by their numbers in the job, for error messages.
  Mailbox(std::vector<int> ranks, int rank, uint32_t epoch);
  ~Mailbox();
  Mailbox(const Mailbox&) = delete;
  Mailbox& operator=(const Mailbox&) = delete;

  // Any thread may call add_outgoing() and add_incoming(). The link to a peer must be added before the first send to the peer.
  // The link from a peer may be added while a recv already waits for a message from the peer. When a link has ended and all its
  // data has been read, its transfers fail. As long as the link from a peer does not exist, the watch of a recv must find out
  // whether the peer is gone.
  void add_outgoing(int peer, Stream stream);
  void add_incoming(int peer, Stream stream);

  // start_send() and start_recv() start a transfer and return without waiting. Several threads may call them at once. data must
  // live until the transfer has ended. A message to this rank itself, or a message that has already come, is copied at once. All
  // other bytes move later, in wait() or on the mailbox's own thread.
  std::shared_ptr<Transfer> start_send(int peer, int64_t tag, Dtype dtype, const void* data, size_t bytes);
  // A recv from any source does not end when peers close their links. So the watch of the recv must find out if no peer is left.
  std::shared_ptr<Transfer> start_recv(int peer, int64_t tag, Dtype dtype, void* data, size_t bytes);
  // Returns when the transfer has ended, or throws the transfer's error. If wait.look() throws, the transfer is dropped. If the
  // transfer had begun by then, its link ends, too.
  void wait(const std::shared_ptr<Transfer>& transfer, const Wait& wait);
  // Whether the link from `peer` has ended and all its data has been read.
  bool ended(int peer) const;
  // Lets the mailbox's own thread wait for the transfer. When the transfer has ended, that thread calls `ended` with the
  // transfer's error, or with nullopt. The watch must not call Python, and must live until `ended` has returned.
  using Ended = std::function<void(const std::optional<Error>&)>;
  void detach(std::shared_ptr<Transfer> transfer, const Wait& wait, Ended ended);

  // Ends all links and transfers. Any thread may call this at any time. It calls no callback, and waits only for mutex_. No
  // thread holds mutex_ for longer than it takes to copy one piece for each link, or a message to this rank itself.
  void shut_down();
  // Ends all transfers. Then waits for at most timeout_s until the peers' kernels have received all bytes that were sent. Then
  // closes the links.
  void close(double timeout_s);
  // Called in a forked child. Closes the child's copies of the descriptors. Takes no lock.
  void close_descriptors();

 private:
  using Shared = std::shared_ptr<Transfer>;
  struct Ending {
    std::string kind, why;
  };
  struct Outgoing {
    std::optional<Stream> stream;
    std::optional<Ending> ended;
    std::deque<Shared> queue;            // sends that have not begun, and announced sends whose data may be sent now
    std::map<uint64_t, Shared> waiting;  // announced sends that are not cleared yet, by id
    uint64_t last_id = 0;
    size_t credit = eager_window;
    // The message that is being written:
    Shared current;
    Envelope::Kind kind{};
    std::vector<char> head;  // the header, and also the payload if the message is sent whole
    size_t head_sent = 0;
    size_t payload_sent = 0;
    // The header that the receiver is sending back:
    Envelope inbox;
    size_t inbox_got = 0;

    bool writes() const { return stream && !ended && (current || !queue.empty()); }
    bool reads() const { return stream && !ended && (writes() || !waiting.empty()); }
  };
  struct Unexpected {
    Envelope envelope;
    uint64_t turn;              // the place of the message in the order in which messages from all sources came
    std::vector<char> payload;  // empty if the message was only announced
  };
  struct Incoming {
    std::optional<Stream> stream;
    std::optional<Ending> ended;
    std::deque<Shared> posted;           // recvs that have no message yet, in order
    std::deque<Unexpected> unexpected;   // messages that have no recv yet, in order
    std::map<uint64_t, Shared> cleared;  // recvs that have asked for the data of an announced message, by the id of the message
    uint64_t last_id = 0;
    size_t uncredited = 0;  // bytes of whole messages that have come and for which no credit was returned yet
    size_t matched = 0;     // how many of the uncredited bytes belong to messages that were matched to recvs
    // The message that is being read:
    Envelope inbox;
    size_t inbox_got = 0;
    Shared current;  // the recv that the payload is for; nullptr: the payload goes to `kept`
    std::vector<char> kept;
    size_t payload_got = 0;
    // The headers that are sent back:
    std::deque<Envelope> outbox;
    size_t outbox_sent = 0;
    bool deaf = false;  // the peer accepts no data any more, but what it has sent can still be read

    bool reads(bool for_any) const { return stream && !ended && (for_any || !posted.empty() || !cleared.empty() || current); }
    bool writes() const { return stream && !ended && !deaf && !outbox.empty(); }
  };
  struct Detached {
    Shared transfer;
    Wait wait;
    Ended ended;
  };

  std::unique_lock<std::mutex> enter() const;
  void wake_driver() const;
  void tell_finished();
  bool turn(std::unique_lock<std::mutex>& lock);
  bool end_silent_links();
  bool await_change(std::unique_lock<std::mutex>& lock);
  std::vector<int> missing(const Transfer& transfer) const;
  void serve();
  void serve_detached();
  void shut_down(const Error& why);
  void stop_thread();

  bool move_some();
  bool write_some(int peer);
  bool read_returns(int peer);
  bool reads(const Incoming& link) const { return link.reads(!posted_for_any_.empty()); }
  bool read_some(int peer);
  bool write_returns(int peer);
  void take_return(int peer);
  bool open(int peer);
  void deliver(int peer);
  bool valid(const Envelope& envelope, int peer) const;
  Envelope envelope(Envelope::Kind kind, uint64_t id) const;

  Shared match(int peer, const Envelope& envelope);
  bool fits(const Shared& recv, int peer, const Envelope& envelope);
  void keep(int peer, const Envelope& envelope, std::vector<char> payload);
  void clear_to_send(int peer, const Shared& recv, uint64_t id);
  void give_back(Incoming& link, size_t bytes);

  void finish(const Shared& transfer, std::optional<Error> error = {});
  void drop(const Shared& transfer, const Error& error);
  void end_outgoing(int peer, Ending ending);
  void end_incoming(int peer, Ending ending);
  Error lost(const Transfer& transfer, int peer, const Ending& ending) const;
  std::string text(const Transfer& transfer) const;
  std::string named(int peer) const { return "rank " + std::to_string(ranks_[peer]); }
  void check_peer(int peer) const;

  const std::vector<int> ranks_;
  const int rank_;
  const uint32_t epoch_;
  int wake_fd_;  // an eventfd that wakes the driver from poll(); -1: closed

  // mutex_ protects everything below. Threads hold it while bytes move, but not while they wait or run a callback.
  mutable std::mutex mutex_;
  mutable std::atomic<int> entering_{0};                // how many threads wait for mutex_; the driver lets them go first
  std::unique_ptr<std::condition_variable> changed_;    // notified when a transfer or the mailbox ends, or the driver leaves
  std::unique_ptr<std::condition_variable> detaching_;  // wakes the idle thread_ for a new transfer, or when the mailbox ends
  std::vector<Outgoing> outgoing_;
  std::vector<Incoming> incoming_;     // by source; this rank's own entry has no stream
  std::deque<Shared> posted_for_any_;  // recvs from any source that have no message yet, in order
  uint64_t last_turn_ = 0;             // the last number that was given as a turn to a posted recv or a kept message
  int first_ = 0;                      // the peer whose links are served first; it changes each time, so that no peer starves
  std::list<Detached> detached_;
  bool driving_ = false;   // whether one of the waiting threads, called the driver, is in poll() for all of them
  bool finished_ = false;  // whether a transfer has ended since changed_ was last notified
  bool stopping_ = false;
  std::optional<Error> shut_;
  std::unique_ptr<std::thread> thread_;  // made by the first detach()
};

}  // namespace mscomm
