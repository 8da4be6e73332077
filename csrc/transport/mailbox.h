// A mailbox moves a group's point-to-point messages. It has links of its own, so messages do not disturb collectives.
//
// A link carries messages from one rank to another. The receiver sends only three kinds of header back on the link: permission to
// send a message's data, the news that it has read the data itself, and credit to send more messages whole. If a message has at
// most eager_bytes, and the sender has enough credit, the message is sent whole. Any other message is announced first. After a
// recv has been matched to it, its data follows, or a receiver on the same host reads the data from the sender's memory. So large
// messages from a peer use no mailbox memory, and small messages use at most eager_window for each peer. An announcement reaches
// the receiver even if earlier messages still have no recv. So a program hangs only if it would also hang with synchronous sends,
// which return only after their recv has been called. A send of at most eager_bytes may return before its recv is called, but
// programs must not rely on that. A message from a rank to itself is copied at once, either to a waiting recv or to a mailbox
// buffer.
//
// A recv may accept any source or any tag. Matching follows the MPI rules: a message goes to the first recv that accepts it, in
// the order in which the recvs were called. A recv takes the first message that it accepts, in the order in which the messages
// arrived. Messages from one source arrive in the order in which that source sent them.
//
// The mailbox accesses the caller's array only while it holds mutex_, and only until the transfer of that array has completed. So
// no thread of this process accesses the array after wait() has returned or thrown, or after shut_down() has returned.
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
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "base/descriptor.h"
#include "base/error.h"
#include "base/types.h"
#include "net/frame.h"
#include "net/stream.h"
#include "net/wait.h"

namespace mscomm {

// A message of at most eager_bytes may be sent before its recv is called. On each link, at most eager_window bytes of such
// messages (including their headers) may be waiting for a recv at any time.
inline constexpr size_t eager_bytes = 16u << 10;
inline constexpr size_t eager_window = 1u << 20;
// At most this many messages from one peer may be waiting for a recv. If a peer announces more, the link ends with an error.
inline constexpr size_t most_unexpected = 1u << 16;
inline constexpr uint32_t envelope_magic = 0x5043534d;  // "MSCP" in memory

inline constexpr int any_source = -1;
inline constexpr int64_t any_tag = std::numeric_limits<int64_t>::min();
// The highest tag that users may pass. Higher tags are reserved for the bytes of Python objects (see python/mscomm/objects.py),
// and any_tag does not match them.
inline constexpr int64_t last_tag = std::numeric_limits<int32_t>::max();

// The header of a message, or a header that the receiver sends back.
struct Envelope {
  enum class Kind : uint8_t {
    whole,     // the payload follows
    announce,  // the payload follows after the receiver has sent `clear` with this id
    data,      // the payload of an announced message follows
    clear,     // receiver to sender: a recv was matched to the message with this id
    credit,    // receiver to sender: `count` bytes of whole messages have been matched to recvs
    taken,     // receiver to sender: the receiver has read the payload of the announced message from the sender's memory
  };

  uint32_t magic = envelope_magic;
  uint16_t wire = wire_version;
  Kind kind = Kind::whole;
  Dtype dtype = Dtype::uint8;
  uint32_t epoch = 0;
  uint32_t source = 0;  // the rank that sends this header
  int64_t tag = 0;
  uint64_t count = 0;  // the number of elements; in a header of kind credit, the number of bytes
  uint64_t id = 0;     // the number of the message on its link, counting from 1
  // In an announcement, the address of the payload in the sender's process, for receivers on the same host. Otherwise 0.
  uint64_t address = 0;
};
static_assert(sizeof(Envelope) == 48);

// One send or recv. The memory at `data` is in use until the transfer of the message has completed. A send only reads this
// memory.
struct Message {
  bool sends;
  int peer;     // a rank of the group, or any_source
  int64_t tag;  // the tag of the message, or any_tag
  Dtype dtype;
  void* data;
  size_t bytes;
};

// The message that a recv was matched to: its source (a rank of the group) and its tag.
struct Matched {
  int peer;
  int64_t tag;
};

// A send or recv that the mailbox has started.
class Transfer : public Message {
 public:
  explicit Transfer(const Message& message) : Message(message), matched_peer_(message.peer), matched_tag_(message.tag) {}

  // Returns whether the transfer has completed, successfully or not.
  bool done() const { return done_.load(); }
  // Call this only after done() has returned true.
  const std::optional<Error>& error() const { return error_; }
  // Valid after the transfer has completed without an error.
  Matched matched() const { return {matched_peer_, matched_tag_}; }

 private:
  friend class Mailbox;
  char* at(size_t offset) const { return static_cast<char*>(data) + offset; }

  // The mailbox's mutex protects the memory at `data` and the fields below. The atomic fields are also read without it.
  bool begun_ = false;  // whether part of the message may be on the link; if so, dropping the transfer ends the link
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
  using Shared = std::shared_ptr<Transfer>;

  // ranks: the job rank of each rank of the group, for error messages. spin: whether the host has a CPU for each rank.
  Mailbox(std::vector<int> ranks, int rank, uint32_t epoch, bool spin);
  ~Mailbox();
  Mailbox(const Mailbox&) = delete;
  Mailbox& operator=(const Mailbox&) = delete;

  // Adds the link to a peer (if `sends` is true) or the link from a peer. Any thread may call add_link(). The link to a peer
  // must be added before the first send to that peer. The link from a peer may be added while a recv is already waiting for a
  // message from that peer. When a link has ended and all its data has been read, its transfers fail. As long as there is no
  // link from a peer, the Watch of a recv must detect that the peer is gone.
  void add_link(bool sends, int peer, Stream stream);

  bool has_link_to(int peer) const { return linked_[peer]; }
  bool has_link_from(int peer) const {
    const auto lock = enter();
    return incoming_[peer].stream.has_value();
  }

  // Starts a send or a recv, and returns without waiting. Several threads may call this at the same time. A message to this rank
  // itself, or a message that has already arrived, is copied at once. A send to a peer is written at once as far as the link
  // accepts it. All other bytes move later, in wait(), in help() or on the mailbox's own thread. A recv from any source does not
  // end when peers close their links, so the Watch of the recv must detect that no peer is left.
  std::shared_ptr<Transfer> start(const Message& message);
  // Returns when the transfer has completed, or throws the transfer's error. If wait.look() throws, the transfer is dropped. If
  // the transfer had begun by then, its link ends too.
  void wait(const std::shared_ptr<Transfer>& transfer, const Wait& wait);
  // Returns whether the link from `peer` has ended and all its data has been read.
  bool ended(int peer) const;
  // Lets the mailbox's own thread wait for the transfer. When the transfer has completed, `ended` is called with the transfer's
  // error, or with nullopt if there is no error: by detach() itself, by the mailbox's own thread, or by another thread that is
  // inside a function of the mailbox. The Watch must not call Python, and must live until `ended` has been destroyed.
  using Ended = std::function<void(const std::optional<Error>&)>;
  void detach(std::shared_ptr<Transfer> transfer, const Wait& wait, Ended ended);
  // Moves bytes on this thread until the detached transfer has completed, for at most timeout_s seconds. While any thread is in
  // wait() or help(), the mailbox's own thread moves no bytes, so that no thread must be woken when a message arrives.
  void help(const Transfer& transfer, double timeout_s);
  // Ends those of the transfers that are recvs for which no message has arrived, with an Error of the kind Cancelled, and returns
  // their texts. All other transfers go on. First reads what has arrived on the links, for at most pass_s. If there is no memory,
  // throws std::bad_alloc and ends none.
  std::vector<std::string> cancel(std::span<const Shared> transfers);

  // Ends all links and transfers. Any thread may call shut_down() at any time. It calls no callback, and waits only for mutex_.
  // No thread holds mutex_ for longer than it takes to copy one piece for each link, or one message to this rank itself.
  void shut_down();
  // Ends all transfers, waits for at most timeout_s until the peers' kernels have received all bytes that were sent, and then
  // closes the links.
  void close(double timeout_s);
  // Closes the child's copies of the descriptors. Called in a forked child. Takes no lock.
  void close_descriptors();
  // Describes the message for an error text, for example "recv from rank 3, tag 7".
  std::string text(const Message& message) const;

 private:
  // Why a link has ended. It is also the exception that is thrown when a peer violates the link's protocol.
  struct Ending : Error {
    using Error::Error;
    explicit Ending(const Error& error) : Error(error) {}
  };
  // An announced message that this rank reads from the memory of the sender.
  struct Read {
    Shared recv;
    Envelope announced;
    size_t done = 0;    // in bytes
    bool told = false;  // whether `taken` is in the outbox, or has been sent
  };
  // What the links to peers and the links from peers have in common.
  struct Link {
    int peer = 0;
    std::optional<Stream> stream;
    std::optional<Ending> ended;
    uint64_t last_id = 0;  // the number of the most recent message that has begun
    // On a link to a peer: sends that have not begun, and announced sends whose data may be sent now. On a link from a peer:
    // recvs that have no message yet, in order.
    std::deque<Shared> queue;
    // Indexed by message number. On a link to a peer: announced sends that have not been cleared yet. On a link from a peer:
    // recvs that have asked for the data of an announced message.
    std::map<uint64_t, Shared> waiting;
    // On a link from a peer: recvs whose message this rank reads from the memory of the sender, in order.
    std::deque<Read> reading;
    Shared current;  // the transfer whose message is being written or read
    // The header that is being read. On a link to a peer, this is a header that the receiver sends back.
    Envelope inbox;
    size_t inbox_got = 0;

    bool alive() const { return stream && !ended; }
  };
  struct Outgoing : Link {
    size_t credit = eager_window;
    // The message that is being written:
    Envelope::Kind kind{};
    std::vector<char> head;  // the header, and also the payload if the message is sent whole
    size_t head_sent = 0;
    size_t payload_sent = 0;

    bool writes() const { return alive() && (current || !queue.empty()); }
    bool reads() const { return alive() && (writes() || !waiting.empty()); }
  };
  struct Unexpected {
    Envelope envelope;
    uint64_t turn;              // the place of the message in the order in which messages from all sources arrived
    std::vector<char> payload;  // empty if the message was only announced
  };
  struct Incoming : Link {
    std::deque<Unexpected> unexpected;  // messages that have no recv yet, in order
    size_t uncredited = 0;              // bytes of whole messages that have arrived, but have not been returned as credit yet
    size_t matched = 0;                 // how many of the uncredited bytes belong to messages that have been matched to recvs
    // The payload that is being read goes to the recv in `current`, or to `kept` if `current` is nullptr.
    std::vector<char> kept;
    size_t payload_got = 0;
    // The headers that are sent back:
    std::deque<Envelope> outbox;
    size_t outbox_sent = 0;
    bool deaf = false;  // whether the peer no longer accepts data; the data that it has sent can still be read

    bool reads(bool for_any) const { return alive() && (for_any || !queue.empty() || !waiting.empty() || current); }
    bool writes() const { return alive() && !deaf && !outbox.empty(); }
  };
  struct Detached {
    Shared transfer;
    Wait wait;
    Ended ended;
  };

  using Lock = std::unique_lock<std::mutex>;
  Lock enter() const;
  void wake_driver() const;
  void tell_finished();
  bool tell_ended(Lock& lock);
  void leave();
  void rest(Lock& lock);
  bool turn(Lock& lock, bool awake, int sleep_ms = longest_sleep_ms);
  bool end_silent_links();
  std::vector<int> missing(const Transfer& transfer) const;
  void serve();
  void serve_detached();
  void stop_thread();

  Link& link(bool sends, int peer) { return sends ? static_cast<Link&>(outgoing_[peer]) : incoming_[peer]; }
  void begin_send(const Shared& send);
  void begin_recv(const Shared& recv);

  bool move_some();
  template <typename Step>
  bool step(Link& link, const Step& step);
  bool write_some(Outgoing& link);
  bool read_returns(Outgoing& link);
  bool reads(const Incoming& link) const { return link.reads(!posted_for_any_.empty()); }
  bool read_some(Incoming& link);
  bool write_returns(Incoming& link);
  void take_return(Outgoing& link);
  void open(Incoming& link);
  void deliver(Incoming& link);
  bool valid(const Envelope& envelope, int peer) const;
  Envelope envelope(Envelope::Kind kind, uint64_t id) const;
  Envelope header_of(const Transfer& send, Envelope::Kind kind) const;

  Shared match(Incoming& link, const Envelope& envelope);
  bool fits(const Shared& recv, int peer, const Envelope& envelope);
  void keep(Incoming& link, const Envelope& envelope, std::vector<char> payload);
  void fetch(Incoming& link, const Shared& recv, const Envelope& announced);
  void clear_to_send(Incoming& link, const Shared& recv, uint64_t id);
  bool read_from_sender(Incoming& link);
  void give_back(Incoming& link, size_t bytes);

  void finish(const Shared& transfer, std::optional<Error> error = {});
  void drop(const Shared& transfer, const Error& error);
  void end(Link& link, const Ending& ending);
  void end_all(Error why);
  Error lost(const Transfer& transfer, const Link& link) const;
  std::string named(int peer) const { return "rank " + std::to_string(ranks_[peer]); }
  void check_peer(int peer) const;

  const std::vector<int> ranks_;
  const int rank_;
  const uint32_t epoch_;
  const bool spin_;
  mutable std::atomic<bool> woken_{false};  // whether the driver has been woken since it began to wait
  std::vector<std::atomic<bool>> linked_;   // for each peer, whether there is a link to it
  Descriptor wake_fd_;                      // an eventfd that wakes the driver (see driving_) from poll(); -1 when closed

  // mutex_ protects everything below. Threads hold it while bytes move, but not while they wait or run a callback.
  mutable std::mutex mutex_;
  mutable std::atomic<int> entering_{0};  // how many threads are waiting for mutex_; the driver lets them go first
  // changed_ is notified when a transfer completes, when the mailbox ends, when the driver stops driving and, for cancel(), when
  // idle_passes_ changes. While thread_ need not move bytes, it waits on detaching_ (see rest()).
  std::unique_ptr<std::condition_variable> changed_ = std::make_unique<std::condition_variable>();
  std::unique_ptr<std::condition_variable> detaching_ = std::make_unique<std::condition_variable>();
  std::vector<Outgoing> outgoing_;
  std::vector<Incoming> incoming_;     // indexed by source; this rank's own entry has no stream
  std::deque<Shared> posted_for_any_;  // recvs from any source that have no message yet, in order
  uint64_t last_turn_ = 0;             // the turn number most recently given to a posted recv or a kept message
  int first_ = 0;                      // the peer whose links are served first; changes each time, so that no peer starves
  std::list<std::shared_ptr<Detached>> detached_;
  int waiting_ = 0;                     // the number of threads in wait(), help() or cancel() that can move bytes
  int cancelling_ = 0;                  // the number of threads in cancel()
  uint64_t idle_passes_ = 0;            // how often move_some() has found nothing to move
  Clock::time_point last_detach_;       // when detached_ last got a transfer
  Clock::time_point unattended_since_;  // since when detached_ has transfers, and no thread waits; valid only if this is so
  bool asleep_ = false;                 // whether thread_ sleeps until it is notified
  bool helped_ = false;                 // whether the last bytes of detached transfers were moved by help(), not by thread_
  bool driving_ = false;                // whether a waiting thread (the driver) is polling for all waiting threads
  bool finished_ = false;               // whether a transfer has completed since changed_ was last notified
  bool unreported_ = false;             // whether a transfer has completed since tell_ended() last looked for one
  bool stopping_ = false;
  std::optional<Error> shut_;
  std::unique_ptr<std::thread> thread_;  // created by the first detach()
};

}  // namespace mscomm
