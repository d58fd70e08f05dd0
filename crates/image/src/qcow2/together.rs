//! Several operations under way at once, in one task.

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::task::Poll;

use crate::Error;

/// How many are under way at once.
const MOST: usize = 32;

/// Run all futures to their ends, some of them side by side; the first error is given when those
/// begun have ended, and the rest are not begun.
pub(super) async fn together<F: Future<Output = Result<(), Error>>>(
    futures: impl IntoIterator<Item = F>,
) -> Result<(), Error> {
    let mut futures = futures.into_iter();
    let mut under_way: Vec<Pin<Box<F>>> = Vec::new();
    let mut end = Ok(());
    poll_fn(|context| {
        loop {
            under_way.retain_mut(|future| match future.as_mut().poll(context) {
                Poll::Ready(result) => {
                    end = end.and(result);
                    false
                }
                Poll::Pending => true,
            });
            if under_way.len() >= MOST || end.is_err() {
                break;
            }
            let before = under_way.len();
            under_way.extend(futures.by_ref().take(MOST - before).map(Box::pin));
            // The new ones have to be polled once, to begin.
            if under_way.len() == before {
                break;
            }
        }
        if under_way.is_empty() { Poll::Ready(end) } else { Poll::Pending }
    })
    .await
}
