// A mesh is a set of links to the other ranks of the group. The thread that runs a call moves the call's bytes over these links.
// Some links exist from the beginning (see Layout::partners). Each other link is set up when a call first needs it. The call
// waits for such a link as it waits for data.
//
// The first bytes of a call on a link are the call's header. A rank uses the data that follows only after it has compared the
// header with its own call.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "base/descriptor.h"
#include "base/error.h"
#include "net/frame.h"
#include "net/stream.h"
#include "net/wait.h"

namespace mscomm {

// The data that an exchange moves over one link in one direction.
struct Piece {
  int peer;
  char* data;  // where the data is sent from, or received to
  size_t bytes;
};

class Mesh {
 public:
  // ranks: the job rank of each rank of the group, for error messages. links: the links that exist already, indexed by rank in
  // the group. spin: whether the host has a CPU for each rank. recorded: returns this rank's own call with the given number, if
  // it is still recorded. wants: called when wanted() has something to return; does not wait.
  using Recorded = std::function<std::optional<Signature>(uint64_t number)>;
  Mesh(
      std::vector<int> ranks, int rank, uint32_t epoch, bool spin, std::vector<std::optional<Stream>> links, Recorded recorded,
      std::function<void()> wants = [] {});

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(links_.size()); }

  // Starts a call. Everything that was queued in earlier calls must have been sent. Does not wait. Now and then, reads and
  // compares the headers of peers from which this rank needs no data. sends, expects: empty, or how many elements this rank sends
  // to each rank and expects from each rank. The peers check these numbers, too.
  void begin(const Signature& mine, std::span<const uint64_t> sends = {}, std::span<const uint64_t> expects = {});
  // Queues the pieces. Later calls to receive(), exchange() and progress() send them. The peers take turns, so that only one link
  // at a time uses the wire. In a peer's turn, this rank sends a part of that peer's piece. If that peer is not reading, the wire
  // is free, so this rank also sends data to the other peers. The data of a piece must stay unchanged until the next exchange()
  // has returned, or until this rank has received an answer that the peer sends only after it has received the whole piece.
  void send(std::span<const Piece> out);
  // Receives all pieces, in any order. `in` has at most one piece from each peer. If no data arrives for a while, receive() sends
  // the header of the current call to each peer whose piece is missing.
  void receive(std::span<const Piece> in, const Wait& wait) { transfer(in, wait, 0); }
  // Sends and receives at the same time. Returns when all pieces of `in` have been received, and all pieces of `out` and all
  // earlier queued pieces have been sent.
  void exchange(std::span<const Piece> out, std::span<const Piece> in, const Wait& wait);
  // Returns a number for all pieces that have been queued so far, and waits until these pieces have been sent.
  uint64_t queued() const { return last_turn_; }
  void wait_until_sent(uint64_t queued, const Wait& wait) { transfer({}, wait, queued); }
  // Compares this rank's own calls with the headers that peers have sent. Does not wait.
  void last_look();
  // Sends as much of the queued data as possible without waiting.
  void progress();
  // Call this if this rank has waited elsewhere for a while: asks for links that do not exist and have data to send.
  void need_unsent();
  // Returns whether everything that was ever queued has been sent.
  bool all_sent() const;
  // Returns the peers that this rank is waiting for.
  std::vector<int> missing() const;

  // Any thread may call the next three functions.
  // Returns the peers whose links are needed and were not returned yet.
  std::vector<int> wanted();
  // Says that the link to the peer is being set up. Until expect() or add() was called, a call that needs the peer fails when the
  // peer has left or its process has ended.
  void expect(int peer);
  // Adds the link to a peer. If there is one already, or all links have ended, ends the new one.
  void add(int peer, Stream stream);

  // Ends all links at once, so that both sides stop waiting. Any thread may call this.
  void shut_down();
  // Waits for at most timeout_s until the peers' kernels have received all bytes that were sent, and then ends all links.
  void close(double timeout_s);
  // Closes the child's copies of the sockets. Called in a forked child. If these copies stayed open, the peers would not notice
  // when the parent exits.
  void close_descriptors();

 private:
  struct Queued {
    Piece piece;
    uint64_t turn;
  };
  struct Link {
    std::optional<Stream> stream;  // changed only under new_mutex_, and only by the thread that uses the mesh
    std::optional<Stream> added;   // what add() was given, until that thread moves it to `stream`; under new_mutex_
    bool needed = false;           // whether a call has needed the link while it did not exist
    bool wanted = false;           // whether wanted() returns the peer, or has returned it
    // Set when reading has found the end of the link. The end is a failure only if we are still waiting for data from this peer.
    std::optional<Stream::Broken> ended;
    std::optional<Stream::Broken> unsent;  // set when sending has found the end of the link after data was announced

    bool greeted = false;    // whether we have told the peer which call we are in
    bool announced = false;  // whether we have also told the peer that data follows
    std::deque<Header> outbox;
    size_t outbox_sent = 0;  // bytes of outbox.front() that were sent
    // Whether the headers were offered together with the first piece, and not all accepted. An encrypted link then takes only the
    // same bytes.
    bool together = false;
    std::deque<Queued> queue;  // pieces to send after the outbox; a part of the first one may have been sent already

    // Bytes that were received too early: a part of a header, or headers and data of later calls.
    std::vector<char> early;
    size_t early_used = 0;  // how many of these bytes have been used
    bool due = false;       // whether the peer's header for the current call agrees with ours and announces data
    bool receiving = false;
    char* receive_at = nullptr;
    size_t receive_left = 0;

    bool sent() const { return outbox.empty() && queue.empty(); }
    bool received() const { return !receiving || (due && receive_left == 0); }
    bool listens() const { return stream && !ended && (due ? receive_left > 0 : unused().size() < sizeof(Header)); }
    std::span<const char> unused() const { return std::span(early).subspan(early_used); }
  };

  // Returns when all pieces of `in` have been received, and all pieces up to the given turn have been sent.
  void transfer(std::span<const Piece> in, const Wait& wait, uint64_t turn);
  bool sent_up_to(uint64_t turn) const;
  void greet(int peer, bool payload);
  // Returns the peer whose turn it is, or -1 if no piece is queued.
  int next();
  // Sends as much as possible of the headers for the peer and, if with_piece, of the first piece. Returns how many bytes of the
  // piece it sent.
  size_t send_some(int peer, bool with_piece);
  bool receive_some(int peer);
  // Compares headers, and copies the data of the current call to its place. Returns how many of the received bytes it has used.
  size_t use(int peer, std::span<const char> bytes);
  void use_early(int peer);
  // Compares our own calls with a header from the peer. Returns false if the peer is in a later call.
  bool compare(int peer, const Header& header);
  bool move_some();
  size_t send_in_turn();
  // Prepares the wait for the links to these peers that do not exist. Usually, both ranks of a link need it then. So the higher
  // rank wants it at once, and the lower one only if it has waited for a while.
  void need(std::span<const Piece> pieces, bool has_waited = false);
  bool needs(int peer, bool has_waited);
  void take_new_links();
  void poll_links(const Wait& wait);
  void look(const Wait& wait);
  bool all_received() const;
  Error lost(int peer, const Stream::Broken& broken) const;

  std::vector<int> ranks_;
  int rank_;
  uint32_t epoch_;
  bool spin_;
  std::vector<Link> links_;
  Recorded recorded_;
  Signature mine_;
  std::vector<uint64_t> sends_, expects_;  // copies, because a header may arrive when the call has ended
  // When look() was last called, or when the current call began if that was later. A call may have many short exchanges, so this
  // time is kept from one exchange to the next.
  Clock::time_point looked_;
  Clock::time_point looked_at_all_;  // when last_look() was last called
  bool moved_ = false;               // whether bytes have moved in the current pass of move_some()
  std::vector<char> arrivals_;       // where a header and a short piece arrive together
  // The queue of turns. Each entry holds a peer and the number of one of its turns. next() skips entries whose pieces were sent
  // before their turns came.
  std::deque<std::pair<int, uint64_t>> turns_;
  uint64_t last_turn_ = 0;
  // When bytes were last sent to a peer in its turn, or when send() was last called while no piece was queued, whichever was
  // later.
  Clock::time_point turn_moved_;
  // What happens to pieces for other peers while the current peer (the one whose turn it is) accepts no data. wait: these pieces
  // stay queued. go: these pieces are sent anyway. none: there are no such pieces, or the current peer accepts data.
  enum class Others { none, wait, go } others_ = Others::none;

  const std::function<void()> wants_;
  // Protects what follows, and the streams of links_ while another thread may look at them.
  std::mutex new_mutex_;
  std::vector<int> wanted_;
  std::vector<bool> expected_;
  Descriptor bell_;     // an eventfd that add() writes to; -1 if all links exist that were needed so far
  bool ended_ = false;  // whether shut_down() or close() was called
  std::atomic<bool> has_new_links_{false};
};

}  // namespace mscomm
