//! End-to-end tests: the real binary on checkpoints made at run time.

mod behaviour;
mod calibration;
mod known_failures;
mod quantize;
mod readme;
mod runs;
mod verify;
