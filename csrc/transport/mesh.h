// A mesh is a set of links, one to every other rank of the group. The thread that runs a call moves the call's bytes over these
// links.
//
// The first bytes of a call on a link are the call's header. A rank uses the data that follows only after it has compared the
// header with its own call.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <span>
#include <vector>

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
  // ranks: the job rank of each rank of the group, for error messages. links: the links to the other ranks, indexed by rank in
  // the group. recorded: returns this rank's own call with the given number, if it is still recorded.
  using Recorded = std::function<std::optional<Signature>(uint64_t number)>;
  Mesh(std::vector<int> ranks, int rank, uint32_t epoch, std::vector<std::optional<Stream>> links, Recorded recorded);

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(links_.size()); }

  // Starts a call. Compares `mine` with the headers that peers have already sent. Does not wait. sends, expects: empty, or how
  // many elements this rank sends to each rank and expects from each rank. The peers check these numbers, too.
  void begin(const Signature& mine, std::span<const uint64_t> sends = {}, std::span<const uint64_t> expects = {});
  // Queues the pieces. Later calls to receive(), exchange() and progress() send them. The peers take turns, so that only one link
  // at a time uses the wire. In a peer's turn, this rank sends a part of that peer's piece. If that peer is not reading, the wire
  // is free, so this rank also sends data to the other peers. The data of a piece must stay unchanged until the next exchange()
  // has returned, or until this rank has received an answer that the peer sends only after it has received the whole piece.
  void send(std::span<const Piece> out);
  // Receives all pieces, in any order. `in` has at most one piece from each peer. If no data arrives for a while, receive() sends
  // the header of the current call to each peer whose piece is missing.
  void receive(std::span<const Piece> in, const Wait& wait) { transfer(in, wait, false); }
  // Sends and receives at the same time. Returns when all pieces of `in` have been received, and all pieces of `out` and all
  // earlier queued pieces have been sent.
  void exchange(std::span<const Piece> out, std::span<const Piece> in, const Wait& wait);
  // Compares this rank's own calls with the headers that peers have sent since begin(). Does not wait.
  void last_look();
  // Sends as much of the queued data as possible without waiting.
  void progress();
  // Returns whether everything that was ever queued has been sent.
  bool all_sent() const;
  // Returns the peers that this rank is waiting for.
  std::vector<int> missing() const;

  // Ends all links at once, so that both sides stop waiting. Any thread may call this.
  void shut_down() const;
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
    std::optional<Stream> stream;
    // Set when reading has found the end of the link. The end is a failure only if we are still waiting for data from this peer.
    std::optional<Stream::Broken> ended;

    bool greeted = false;    // whether we have told the peer which call we are in
    bool announced = false;  // whether we have also told the peer that data follows
    std::deque<Header> outbox;
    size_t outbox_sent = 0;    // bytes of outbox.front() that were sent
    std::deque<Queued> queue;  // pieces to send after the outbox; a part of the first one may have been sent already

    Header inbox;
    size_t inbox_got = 0;  // bytes of inbox that were received
    bool due = false;      // whether the peer's header for the current call agrees with ours and announces data
    bool receiving = false;
    char* receive_at = nullptr;
    size_t receive_left = 0;

    bool sent() const { return outbox.empty() && queue.empty(); }
    bool received() const { return !receiving || (due && receive_left == 0); }
    bool listens() const { return stream && !ended && inbox_got < sizeof(Header) && (!due || receive_left > 0); }
  };

  void transfer(std::span<const Piece> in, const Wait& wait, bool sends_all);
  void greet(int peer, bool payload);
  // Returns the peer whose turn it is, or -1 if no piece is queued.
  int next();
  bool send_some(int peer);
  size_t send_piece(Link& link);
  bool receive_some(int peer);
  // Compares our own calls with the complete header in the inbox of the link to `peer`. Returns false if the peer is in a later
  // call. The header then stays in the inbox until this rank begins that call.
  bool compare_inbox(int peer);
  bool move_some();
  size_t send_in_turn();
  void poll_links(const Wait& wait);
  void look(const Wait& wait);
  bool all_received() const;
  Error lost(int peer, const Stream::Broken& broken) const;

  std::vector<int> ranks_;
  int rank_;
  uint32_t epoch_;
  std::vector<Link> links_;
  Recorded recorded_;
  Signature mine_;
  std::vector<uint64_t> sends_, expects_;  // copies, because a header may arrive when the call has ended
  // When look() was last called, or when the current call began if that was later. A call may have many short exchanges, so this
  // time is kept from one exchange to the next.
  Clock::time_point looked_;
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
};

}  // namespace mscomm
