// A Ring moves the bytes of a Stream between two processes of one host through memory that they share. The socket of the Stream
// then carries only bells, which wake a process that sleeps in poll(), and the end of the link.
#pragma once

#include <unistd.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "base/process_memory.h"

namespace mscomm {

// One end of the ring. All functions return without waiting. Other threads may call ready(), sleeps(),
// wakes() and heard() while one thread calls another function.
class Ring {
 public:
  // The capacity of the lane from the end that made the memory to the other end, and of the lane back, which carries only
  // headers.
  static constexpr std::array<size_t, 2> capacity{128u << 10, 4u << 10};
  // The size of the memory and its alignment, a cache line. The memory must be filled with zeros, and its pages must exist.
  static constexpr size_t memory_bytes = 4096 + capacity[0] + capacity[1], alignment = 64;

  // fd: the socket, which the caller owns. makes: whether this end has made the memory.
  Ring(char* memory, int fd, bool makes);
  ~Ring();
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  // Move as many bytes as possible, and return how many. They throw Stream::Broken when the peer has closed the link.
  size_t send(const void* data, size_t bytes);
  size_t receive(void* data, size_t bytes);
  // Returns whether receive() or send() has something to do: bytes can move, or there may be news in the socket.
  bool ready(bool receives, bool sends) const;
  // Announces that this process is going to sleep until the socket is readable, so that the peer rings. Returns false if ready()
  // has become true in the meantime. wakes() takes the announcement back.
  bool sleeps(bool receives, bool sends);
  void wakes() { mine().wants.store(nothing, std::memory_order_relaxed); }
  // Call this when the socket is readable. The next send() or receive() then reads what is in the socket.
  void heard() { heard_.store(true, std::memory_order_relaxed); }
  // Tells the peer that this end sends and receives nothing more. The peer can still receive what has been sent.
  void close();

  // Returns whether this end can read the memory of the process that made the ring. Only the other end may ask.
  bool reads_maker();
  // Copies bytes from that process to `to`. Returns whether they were copied; if not, their sender must send them. Throws
  // Stream::Broken if the maker has closed the link, because its program may have changed the bytes since.
  bool read_from_maker(uint64_t address, void* to, size_t bytes);

  // Returns whether both ends have been destroyed, so that no process uses the memory any more.
  static bool unused(const char* memory);

 private:
  enum Wants : uint32_t { nothing = 0, bytes_to_read = 1, room_to_write = 2 };
  // The bytes of a lane that have been written and read since the beginning. Each number is changed by one end only.
  struct Lane {
    alignas(64) std::atomic<uint64_t> written;
    alignas(64) std::atomic<uint64_t> read;
  };
  struct End {
    alignas(64) std::atomic<uint32_t> wants;  // what this end sleeps for; the peer rings when it is there
    std::atomic<uint32_t> closed;
  };
  struct Shared {
    Lane lanes[2];
    End ends[2];  // the end that made the memory, and the other end
    std::atomic<uint32_t> destroyed;
    Introduction maker;
  };
  static_assert(sizeof(Shared) <= 4096 && alignof(Shared) == alignment && std::atomic<uint64_t>::is_always_lock_free);

  Shared& shared() const { return *reinterpret_cast<Shared*>(memory_); }
  End& mine() const { return shared().ends[me_]; }
  End& peer() const { return shared().ends[1 - me_]; }
  Lane& out() const { return shared().lanes[me_]; }
  Lane& in() const { return shared().lanes[1 - me_]; }
  char* data(size_t lane) const { return memory_ + 4096 + (lane ? capacity[0] : 0); }
  void ring_for(uint32_t what);
  void look_into_socket();

  char* const memory_;
  const int fd_;
  const size_t me_;                               // 0 for the end that made the memory, 1 for the other end
  uint64_t written_ = 0;                          // out().written
  uint64_t read_ = 0;                             // in().read
  uint64_t peer_read_ = 0;                        // out().read, when it was last loaded
  bool gone_ = false;                             // whether the socket has ended
  std::string why_ = "closed by the other side";  // how the link has ended, for error messages
  std::optional<bool> reads_maker_;               // nullopt if not tried yet
  std::atomic<bool> heard_{false};
  const int owner_ = getpid();  // a forked child has a copy of the Ring, but is not an end of it
};

}  // namespace mscomm
