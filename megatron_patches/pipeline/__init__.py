"""The passes of a global batch in ticks, and the processes that take part in them.

`tick_pipeline` runs forward and backward passes; `attention_server` serves where there is no
micro-batch, in a tick or on a dedicated server; `processes` connects those servers; `servers`
numbers all servers; `transports` chooses what moves rows; `tracing` records a timeline.
"""
