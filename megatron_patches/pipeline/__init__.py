"""The passes of a global batch in ticks, and the processes that take part in them.

`tick_pipeline` runs forward and backward passes; `idle_rank` serves in ticks without a micro-batch;
`processes` and `dedicated` are the dedicated attention servers; `servers` numbers all servers;
`transports` chooses what moves rows; `tracing` records a timeline.
"""
