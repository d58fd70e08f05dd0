//! Several operations in flight at once, in one task.

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::task::Poll;

/// How many are in flight at once.
const MOST: usize = 32;

/// Run all futures to their ends, some of them side by side; the first error is given when those
/// begun have ended, and the rest are not begun.
pub(super) async fn together<E, F: Future<Output = Result<(), E>>>(
    futures: impl IntoIterator<Item = F>,
) -> Result<(), E> {
    let mut futures = futures.into_iter();
    let mut in_flight: Vec<Pin<Box<F>>> = Vec::new();
    let mut end = Ok(());
    poll_fn(|context| {
        loop {
            in_flight.retain_mut(|future| match future.as_mut().poll(context) {
                Poll::Ready(result) => {
                    if end.is_ok() {
                        end = result;
                    }
                    false
                }
                Poll::Pending => true,
            });
            if in_flight.len() >= MOST || end.is_err() {
                break;
            }
            let before = in_flight.len();
            in_flight.extend(futures.by_ref().take(MOST - before).map(Box::pin));
            // The new ones have to be polled once, to begin.
            if in_flight.len() == before {
                break;
            }
        }
        match in_flight.is_empty() {
            true => Poll::Ready(std::mem::replace(&mut end, Ok(()))),
            false => Poll::Pending,
        }
    })
    .await
}
