package interop;

import java.util.ArrayList;
import java.util.HashMap;
import java.util.Iterator;
import java.util.List;
import java.util.Map;
import java.util.Set;

/** A command line: positional words, {@code --name value} options and bare {@code --flag}s. */
final class Arguments {
  private static final Set<String> FLAGS = Set.of("--kill", "--messages");

  private final List<String> words = new ArrayList<>();
  private final Map<String, String> options = new HashMap<>();

  Arguments(Iterable<String> line) {
    for (Iterator<String> rest = line.iterator(); rest.hasNext();) {
      String word = rest.next();
      if (FLAGS.contains(word)) {
        options.put(word, "");
      } else if (word.startsWith("--")) {
        if (!rest.hasNext()) {
          throw new IllegalArgumentException(word + " needs a value");
        }
        options.put(word, rest.next());
      } else {
        words.add(word);
      }
    }
  }

  /** Rejects another number of words, and unknown options. */
  Arguments expect(int count, String... known) {
    if (words.size() != count) {
      throw new IllegalArgumentException("expected " + count + " words, got " + words);
    }
    for (String name : options.keySet()) {
      if (!List.of(known).contains(name)) {
        throw new IllegalArgumentException("unknown option " + name);
      }
    }
    return this;
  }

  String word(int index) {
    return words.get(index);
  }

  boolean has(String name) {
    return options.containsKey(name);
  }

  String text(String name, String otherwise) {
    return options.getOrDefault(name, otherwise);
  }

  long number(String name, long otherwise) {
    return options.containsKey(name) ? Long.parseLong(options.get(name)) : otherwise;
  }
}
