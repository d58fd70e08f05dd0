//! Operations as data, the reactor that carries them out, and the loop of tasks that waits for them.
