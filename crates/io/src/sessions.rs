//! What a thread has of those who carry out operations elsewhere.

use std::rc::Rc;

use crate::File;

/// The sessions of one thread, by the places of their files.
pub(crate) struct Sessions<S: ?Sized>(Vec<Option<(u32, Rc<S>)>>);

impl<S: ?Sized> Default for Sessions<S> {
    fn default() -> Sessions<S> {
        Sessions(Vec::new())
    }
}

impl<S: ?Sized> Sessions<S> {
    /// That of a file, where there is one.
    pub(crate) fn known(&self, file: File) -> Option<Rc<S>> {
        let (generation, session) = self.0.get(file.place_elsewhere() as usize)?.as_ref()?;
        (*generation == file.generation()).then(|| session.clone())
    }

    pub(crate) fn keep(&mut self, file: File, session: Rc<S>) {
        let place = file.place_elsewhere() as usize;
        if self.0.len() <= place {
            self.0.resize_with(place + 1, || None);
        }
        self.0[place] = Some((file.generation(), session));
    }

    pub(crate) fn clear(&mut self) {
        self.0.clear();
    }
}
