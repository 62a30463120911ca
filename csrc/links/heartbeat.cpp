// links/heartbeat.cpp: see heartbeat.h. The thread lives while there is a word to beat.
#include "links/heartbeat.h"

#include <csignal>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace tpk::links {

namespace {

struct Heart {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<Word*> words;
  std::jthread thread;
};

std::atomic<Heart*> current{nullptr}; // never destroyed

void forget_after_fork() { current.store(nullptr); } // the parent's thread does not exist here; its memory is left alone

Heart& heart() {
  static std::once_flag registered;
  std::call_once(registered, [] { pthread_atfork(nullptr, nullptr, forget_after_fork); });
  Heart* known = current.load();
  if (known != nullptr) return *known;
  auto fresh = std::make_unique<Heart>();
  if (current.compare_exchange_strong(known, fresh.get())) return *fresh.release();
  return *known;
}

void beat(const std::stop_token& stop, Heart& heart) {
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, nullptr); // signals are for Python's main thread
  std::unique_lock lock(heart.mutex);
  while (!stop.stop_requested()) {
    for (Word* word : heart.words) word->fetch_add(1, std::memory_order_relaxed);
    heart.changed.wait_for(lock, kBeat);
  }
}

} // namespace

void begin_heartbeat(Word& word) {
  Heart& all = heart();
  const std::lock_guard lock(all.mutex);
  all.words.push_back(&word);
  try {
    if (all.words.size() == 1) all.thread = std::jthread(beat, std::ref(all));
  } catch (...) { // no thread was to be had; the word's memory will go
    all.words.pop_back();
    throw;
  }
}

void end_heartbeat(Word& word) {
  Heart& all = heart();
  std::jthread ended; // joins at the end of this function, without the lock
  const std::lock_guard lock(all.mutex);
  if (std::erase(all.words, &word) != 0 && all.words.empty()) ended = std::move(all.thread), ended.request_stop(), all.changed.notify_all();
}

} // namespace tpk::links
