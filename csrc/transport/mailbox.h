// The mailbox: a group's point-to-point messages, over links of their own, beside its collectives.
//
// A link carries messages from one rank to another. Only two kinds of header come back on it: permission to send, and credit. A
// message of at most eager_bytes is sent whole while there is credit. Any other message is announced, and its data follows when a
// recv has been matched to it. So large messages cost the receiver no memory, and small ones at most eager_window for each
// source. A recv always sees the announcement of its message, whatever was sent before it: a program hangs only if it would also
// hang if every send waited for its recv. A send of at most eager_bytes may return before its recv is called, but programs must
// not rely on that. A message to this rank itself is copied at once, to a recv that waits for it or to a buffer of the mailbox.
//
// A recv may take a message from any source or with any tag. As in MPI, a message goes to the first recv, in the order of calls,
// that it fits, and a recv takes the first message, in the order of arrival, that fits it. The messages of one source arrive in
// the order in which it sent them.
//
// Which memory is touched when: the mailbox touches x and out only with mutex_ held, and only while their transfer has not ended.
// So no thread of this process touches them after wait() has returned or thrown, or after shut_down() has returned.
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

inline constexpr size_t eager_bytes = 16u << 10;  // the longest message that may be sent before its recv was called
inline constexpr size_t eager_window = 1u << 20;  // per link: bytes of such messages, with headers, that are not yet matched
inline constexpr uint32_t envelope_magic = 0x5043534d;  // "MSCP" in memory

inline constexpr int any_source = -1;
inline constexpr int64_t any_tag = std::numeric_limits<int64_t>::min();
// Higher tags are for the bodies of Python objects, see python/mscomm/objects.py; any_tag does not match them.
inline constexpr int64_t last_tag = std::numeric_limits<int32_t>::max();

// The header of a message, or of what comes back for one.
struct Envelope {
  enum class Kind : uint8_t {
    whole,     // the payload follows
    announce,  // the payload will follow when `clear` with this id has come
    data,      // the payload of an announced message follows
    clear,     // receiver to sender: a recv was matched to the message with this id
    credit,    // receiver to sender: `count` bytes of whole messages were matched
  };

  uint32_t magic = envelope_magic;
  uint16_t wire = wire_version;
  Kind kind = Kind::whole;
  Dtype dtype = Dtype::uint8;
  uint32_t epoch = 0;
  uint32_t source = 0;  // the rank that sends this header
  int64_t tag = 0;
  uint64_t count = 0;  // elements; of credit, bytes
  uint64_t id = 0;     // the message's place on its link, from 1
};
static_assert(sizeof(Envelope) == 40);

// One send or recv.
class Transfer {
 public:
  Transfer(bool sends, int peer, int64_t tag, Dtype dtype, char* data, size_t bytes)
      : sends(sends), peer(peer), tag(tag), dtype(dtype), bytes(bytes), data_(data), matched_peer_(peer), matched_tag_(tag) {}

  // Whether it has ended, with or without an error.
  bool done() const { return done_.load(); }
  // To be called when it has ended.
  const std::optional<Error>& error() const { return error_; }
  // The peer; any_source until a recv from any source is matched to a message.
  int matched_peer() const { return matched_peer_.load(); }
  // The tag of the message; valid when it has ended without an error.
  int64_t matched_tag() const { return matched_tag_; }

  const bool sends;
  const int peer;     // or any_source
  const int64_t tag;  // or any_tag
  const Dtype dtype;
  const size_t bytes;

 private:
  friend class Mailbox;
  // Protected by the mailbox's mutex:
  char* const data_;
  bool begun_ = false;  // its header is being sent, or its data is asked for or coming: its link cannot go on without it
  uint64_t id_ = 0;     // of a send, once begun
  uint64_t turn_ = 0;   // of a recv: its place in the order in which all recvs were posted
  std::atomic<int> matched_peer_;
  int64_t matched_tag_;
  bool cleared_ = false;
  std::optional<Error> error_;
  std::atomic<bool> done_{false};
};

class Mailbox {
 public:
  // ranks: the group's ranks, as ranks of the job, for errors.
  Mailbox(std::vector<int> ranks, int rank, uint32_t epoch);
  ~Mailbox();
  Mailbox(const Mailbox&) = delete;
  Mailbox& operator=(const Mailbox&) = delete;

  // From any thread. The outgoing link must be added before the first send to the peer; the incoming one may be added while a
  // recv already waits for it. Transfers with a peer fail when the link to it ends and all its data was read. If there is no
  // link, the watch must find out that the peer is gone.
  void add_outgoing(int peer, Stream stream);
  void add_incoming(int peer, Stream stream);

  // Start a transfer, and do not wait. Any number of threads may do so at once. data must live until the transfer has ended. They
  // use no link, but copy a message to this rank itself, or one that is here already, at once.
  std::shared_ptr<Transfer> start_send(int peer, int64_t tag, Dtype dtype, const void* data, size_t bytes);
  // A recv from any source does not end when peers close their links: the watch must find out that no peer is left.
  std::shared_ptr<Transfer> start_recv(int peer, int64_t tag, Dtype dtype, void* data, size_t bytes);
  // Returns when the transfer has ended, or throws its error. If wait.look throws, the transfer is dropped, and if it has begun,
  // its link ends.
  void wait(const std::shared_ptr<Transfer>& transfer, const Wait& wait);
  // Whether the link from that rank has ended, and all its data was read.
  bool ended(int peer) const;
  // Leaves the waiting to the mailbox's own thread, which calls `ended` with the transfer's error, if any. The watch must not
  // call Python, and must live until `ended` has returned.
  using Ended = std::function<void(const std::optional<Error>&)>;
  void detach(std::shared_ptr<Transfer> transfer, const Wait& wait, Ended ended);

  // From any thread, at any time: ends all links and transfers. Calls nobody, and waits only for mutex_, at most while one piece
  // is copied.
  void shut_down();
  // Ends all transfers, waits at most timeout_s until the peers' kernels have all that was sent, and closes the links.
  void close(double timeout_s);
  // In a forked child: closes the child's copies of the descriptors. Takes no lock.
  void close_descriptors();

 private:
  using Shared = std::shared_ptr<Transfer>;
  struct Ending {
    std::string kind, why;
  };
  struct Outgoing {
    std::optional<Stream> stream;
    std::optional<Ending> ended;
    std::deque<Shared> queue;            // sends that have not begun, or are cleared and not yet sent
    std::map<uint64_t, Shared> waiting;  // announced, by id
    uint64_t last_id = 0;
    size_t credit = eager_window;
    // What is being written.
    Shared current;
    Envelope::Kind kind{};
    std::vector<char> head;  // the header, and the payload of a whole message
    size_t head_sent = 0;
    size_t payload_sent = 0;
    // What comes back.
    Envelope inbox;
    size_t inbox_got = 0;

    bool writes() const { return stream && !ended && (current || !queue.empty()); }
    bool reads() const { return stream && !ended && (writes() || !waiting.empty()); }
  };
  struct Unexpected {
    Envelope envelope;
    uint64_t turn;              // place in the order in which messages of all sources came
    std::vector<char> payload;  // only of a whole message
  };
  struct Incoming {
    std::optional<Stream> stream;
    std::optional<Ending> ended;
    std::deque<Shared> posted;           // recvs without a message, in order
    std::deque<Unexpected> unexpected;   // messages without a recv, in order
    std::map<uint64_t, Shared> cleared;  // recvs whose data was asked for, by id
    uint64_t last_id = 0;
    size_t uncredited = 0;  // bytes of whole messages that came and for which no credit was returned
    size_t matched = 0;     // of these, the bytes of messages that were matched
    // What is being read.
    Envelope inbox;
    size_t inbox_got = 0;
    Shared current;  // the recv that the payload is for; nullptr: it goes to `kept`
    std::vector<char> kept;
    size_t payload_got = 0;
    // What goes back.
    std::deque<Envelope> outbox;
    size_t outbox_sent = 0;
    bool deaf = false;  // the peer accepts no data any more; what it sent can still be read

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
  int wake_fd_;  // an eventfd that makes the driver's poll return, because there is something new; -1: closed

  // Protects everything below. Held while bytes move, never during a wait or a callback.
  mutable std::mutex mutex_;
  mutable std::atomic<int> entering_{0};                // threads that want mutex_, to which the driver gives way
  std::unique_ptr<std::condition_variable> changed_;    // a transfer ended, the driver left, or the mailbox ends
  std::unique_ptr<std::condition_variable> detaching_;  // the idle own thread has a transfer to wait for, or the mailbox ends
  std::vector<Outgoing> outgoing_;
  std::vector<Incoming> incoming_;     // by source; this rank's own has no stream
  std::deque<Shared> posted_for_any_;  // recvs from any source without a message, in order
  uint64_t last_turn_ = 0;             // the last one given to a posted recv or to a message that was kept
  int first_ = 0;                      // the peer whose links are served first; it changes each time, so that none starves
  std::list<Detached> detached_;
  bool driving_ = false;   // one of the waiting threads, the driver, is in poll() for all of them
  bool finished_ = false;  // a transfer has ended since changed_ was notified
  bool stopping_ = false;
  std::optional<Error> shut_;
  std::unique_ptr<std::thread> thread_;  // made by the first detach()
};

}  // namespace mscomm
