// Threads that work together on one task after another. A task is divided into pieces.
//
// Pieces are claimed, not assigned: a thread that the system suspends delays only the piece that it has claimed.
// Waiting threads spin for some microseconds and then sleep, so that other processes get the core.

#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

class Pool {
  public:
    explicit Pool(int num_threads) {
        for (int i = 1; i < num_threads; i++)
            helpers.emplace_back([this, i] { help(i); });
    }

    ~Pool() {
        is_ending.store(true);
        publish(0);
        for (auto &helper : helpers)
            helper.join();
    }

    int num_threads() const { return (int)helpers.size() + 1; }

    // Calls act(piece, thread) for every piece; returns when all are done.
    template <class Act> void run(int num_pieces, Act &&act) {
        if (num_pieces <= 1 || helpers.empty()) {
            for (int piece = 0; piece < num_pieces; piece++)
                act(piece, 0);
            return;
        }
        subject = &act;
        call = [](void *subject, int piece, int thread) { (*(std::remove_reference_t<Act> *)subject)(piece, thread); };
        unfinished.store(num_pieces, std::memory_order_relaxed);
        publish(num_pieces);
        work(0);
        for (int spins = 0; unfinished.load(std::memory_order_acquire); spins++) {
            if (spins < SPINS)
                relax();
            else if (int left = unfinished.load(std::memory_order_acquire))
                unfinished.wait(left, std::memory_order_acquire);
        }
    }

  private:
    static constexpr int SPINS = 1500; // some 30 microseconds
    static constexpr uint64_t FIELD = 1 << 20;

    // Round, number of pieces and next piece in one word, so that a claim is valid for its own round only.
    std::atomic<uint64_t> ticket{0};
    std::atomic<uint32_t> round{0};
    std::atomic<int> unfinished{0};
    std::atomic<int> sleepers{0};
    std::atomic<bool> is_ending{false};
    void *subject = nullptr;
    void (*call)(void *, int, int) = nullptr;
    std::vector<std::thread> helpers;

    static void relax() {
#if defined(__x86_64__)
        _mm_pause();
#endif
    }

    static bool has_work(uint64_t ticket) { return ticket % FIELD < ticket / FIELD % FIELD; }

    void publish(int num_pieces) {
        uint32_t number = round.load(std::memory_order_relaxed) + 1;
        ticket.store(((uint64_t)number * FIELD + num_pieces) * FIELD, std::memory_order_release);
        round.store(number, std::memory_order_seq_cst);
        if (sleepers.load(std::memory_order_seq_cst))
            round.notify_all();
    }

    void work(int thread) {
        while (has_work(ticket.load(std::memory_order_relaxed))) {
            uint64_t claim = ticket.fetch_add(1, std::memory_order_acq_rel);
            if (!has_work(claim))
                return;
            call(subject, (int)(claim % FIELD), thread);
            if (unfinished.fetch_sub(1, std::memory_order_acq_rel) == 1)
                unfinished.notify_one();
        }
    }

    void help(int thread) {
        for (;;) {
            // Before the look at `is_ending`: the round of the end must not count as seen, or nothing would end the wait.
            uint32_t seen = round.load(std::memory_order_seq_cst);
            if (is_ending.load())
                return;
            work(thread);
            for (int spins = 0; spins < SPINS && !has_work(ticket.load(std::memory_order_relaxed)); spins++)
                relax();
            if (has_work(ticket.load(std::memory_order_relaxed)))
                continue;
            sleepers.fetch_add(1, std::memory_order_seq_cst);
            round.wait(seen, std::memory_order_seq_cst);
            sleepers.fetch_sub(1, std::memory_order_seq_cst);
        }
    }
};
