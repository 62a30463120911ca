// links/heartbeat.cpp: see heartbeat.h. The thread lives while there is a word to beat.
#include "links/heartbeat.h"

#include <csignal>
#include <pthread.h>

#include <algorithm>
#include <condition_variable>
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
  const pid_t owner = getpid();
};

Heart& heart() {
  static Heart* const instance = new Heart; // never destroyed: a forked child inherits it without its thread
  return *instance;
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
  if (all.owner != getpid()) return;
  const std::lock_guard lock(all.mutex);
  all.words.push_back(&word);
  if (all.words.size() == 1) all.thread = std::jthread(beat, std::ref(all));
}

void end_heartbeat(Word& word) {
  Heart& all = heart();
  if (all.owner != getpid()) return;
  std::jthread ended; // joins at the end of this function, without the lock
  const std::lock_guard lock(all.mutex);
  std::erase(all.words, &word);
  if (all.words.empty()) ended = std::move(all.thread), ended.request_stop(), all.changed.notify_all();
}

} // namespace tpk::links
