"""Prefill for other engines: ranks that share long prompts, and send their keys and values.

    engine (vLLM)                          prefill ranks, the same program on each
    client.PrefillClient  -- request -->   front.Front         rank 0: sockets
                                           ranks.PrefillRank   each rank: engine, model, rows
                          <-- rows ---     straight from each rank, a layer at a time

`facts` says what both sides must agree on, `messages` what they say. Rows go from a rank's `outbox`
to an engine's `inbox`: NIXL (`nixl`) writes them into the engine's memory, or they are messages
over TCP. `heads` says which rank sends which heads, and `assembly` puts them together.
Between two of its steps the engine calls `PrefillClient.poll`, which gives it the rows that have
come, and says which prompts have ended. Who may write and read what, and what happens when either
side ends, is `distca.schedule.serving.handoff.protocol`.
"""
