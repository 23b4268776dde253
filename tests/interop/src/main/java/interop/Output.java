package interop;

import com.google.gson.Gson;
import com.google.gson.GsonBuilder;
import java.io.BufferedWriter;
import java.io.FileDescriptor;
import java.io.FileOutputStream;
import java.io.IOException;
import java.io.OutputStreamWriter;
import java.io.UncheckedIOException;
import java.io.Writer;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.security.MessageDigest;
import java.security.NoSuchAlgorithmException;
import java.util.HexFormat;
import java.util.LinkedHashMap;
import java.util.Map;

/** JSON lines on standard output, and the encodings of bytes in them. */
final class Output {
  private static final Gson GSON = new GsonBuilder().serializeNulls().create();

  private final Writer writer = new BufferedWriter(
      new OutputStreamWriter(new FileOutputStream(FileDescriptor.out), StandardCharsets.UTF_8), 1 << 16);

  /** Prints one line from alternating names and values. */
  void line(Object... namesAndValues) {
    line(map(namesAndValues));
  }

  /** Prints one line. */
  void line(Map<String, Object> values) {
    try {
      writer.write(GSON.toJson(values));
      writer.write('\n');
    } catch (IOException e) {
      throw new UncheckedIOException(e);
    }
  }

  /** Prints an empty line and flushes the output. */
  void end() throws IOException {
    writer.write('\n');
    writer.flush();
  }

  void flush() throws IOException {
    writer.flush();
  }

  static Map<String, Object> map(Object... namesAndValues) {
    Map<String, Object> map = new LinkedHashMap<>();
    for (int i = 0; i < namesAndValues.length; i += 2) {
      map.put((String) namesAndValues[i], namesAndValues[i + 1]);
    }
    return map;
  }

  static String hex(byte[] bytes) {
    return HexFormat.of().formatHex(bytes);
  }

  static MessageDigest sha256() {
    try {
      return MessageDigest.getInstance("SHA-256");
    } catch (NoSuchAlgorithmException e) {
      throw new IllegalStateException(e);
    }
  }

  /** Returns the SHA-256 in hex, or null without bytes: a reference has no payload, an empty payload has a hash. */
  static String sha256(byte[] bytes) {
    return bytes == null ? null : hex(sha256().digest(bytes));
  }

  /** Returns the first 8 bytes of the SHA-256, which {@link Tally} adds up. */
  static long sum(byte[] bytes) {
    return ByteBuffer.wrap(sha256().digest(bytes)).getLong();
  }
}
